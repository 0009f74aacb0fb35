"""Joins of scalars over several stages: first within each stage, and the same number in the end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar._jax import eval_jaxpr, make_jaxpr
from autopar.inter_op.local_joins import join_locally
from autopar.inter_op.update_rounds import AFTER_LOOP
from autopar.ir.build import flat_function

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
STAGES = (0, 1, 0, 1, 2)
"""The stage of each operand."""


def regrouped(function, after_pass=0):
    """The program of a function of five scalars, and the same with its joins regrouped; and what is made between passes."""
    jaxpr = flat_function(function, *[SCALAR] * len(STAGES))
    stage_of = dict(zip(jaxpr.invars, STAGES, strict=True))
    given = {jaxpr.eqns[-1].outvars[0]: after_pass}
    eqns, made = join_locally(jaxpr, jaxpr.eqns, stage_of, given)
    return jaxpr, make_jaxpr(jaxpr.invars, jaxpr.outvars, eqns), made


def stages_met(jaxpr):
    """For each equation, of how many stages its operands are."""
    of = {var: frozenset([stage]) for var, stage in zip(jaxpr.invars, STAGES, strict=True)}
    found = []
    for eqn in jaxpr.eqns:
        own = [of[var] for var in eqn.invars]
        of[eqn.outvars[0]] = frozenset().union(*own)
        found.append((len(of[eqn.outvars[0]]), all(len(stages) == 1 for stages in own) and own[0] == own[1]))
    return found


def total(a, b, c, d, e):
    return a + b + c + d + e


def largest(a, b, c, d, e):
    return jnp.maximum(jnp.maximum(a, b), jnp.maximum(c, jnp.maximum(d, e)))


@pytest.mark.parametrize("function", [total, largest])
def test_stages_join_their_own_first(function):
    before, after, _ = regrouped(function)
    assert not any(within for _, within in stages_met(before)[:1]), "the program joins two stages first"
    assert [within for _, within in stages_met(after)] == [True, True, False, False]
    values = [np.float32(v) for v in (1, -2, 4, 8, 16)]
    assert eval_jaxpr(after, (), *values) == eval_jaxpr(before, (), *values)


def test_new_values_are_made_after_the_pass_of_the_join():
    _, after, made = regrouped(total, after_pass=AFTER_LOOP)
    assert made == {eqn.outvars[0]: AFTER_LOOP for eqn in after.eqns}


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b, c, d, e: (a + c, b + d, e),
        lambda a, b, c, d, e: (a + b, c, d, e),
        lambda a, b, c, d, e: a + b * c,
    ],
    ids=["within stages", "of two values", "of two kinds"],
)
def test_what_stays(function):
    before, after, _ = regrouped(function)
    assert list(after.eqns) == list(before.eqns)


def test_a_sum_that_is_read_elsewhere_is_a_leaf():
    before, after, _ = regrouped(lambda a, b, c, d, e: (x := a + b, x + c + d + e))
    assert after.eqns[0] is before.eqns[0] and list(after.eqns) != list(before.eqns)
