"""Branches that cost next to nothing become selections: both are computed, and one is taken, element by element.

In:     a flat program.
Out:    the same function, in which no cheap `cond` holds the parts of an update together: that of `optax.apply_if_finite`,
        or one that is skipped where the loss scale was too large.
Method: a `cond` is one piece, so that all that its branches read and make is in one place, on one pipeline stage. Equations
        of a few operations per element stand for themselves behind a `select_n`, as under `jax.vmap`; what is heavier (a
        matrix root, a gradient) stays a branch, which runs only if it is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from autopar._jax import Jaxpr, JaxprEqn, make_jaxpr, replace_eqn
from autopar.ir.build import inline_function, substitute
from autopar.ir.region import bodies_of, is_region, kind_of
from autopar.ir.work import Work, num_elements_of

OPERATIONS = 16
"""So many operations for each element that an equation reads or makes are few."""


def branches_as_selections(jaxpr: Jaxpr) -> Jaxpr:
    """A program without conditions on cheap branches, over the same inputs and results."""
    return make_jaxpr(jaxpr.invars, jaxpr.outvars, _selected(jaxpr.eqns, Work()))


def _selected(eqns: Sequence[JaxprEqn], work: Work) -> list[JaxprEqn]:
    made: list[JaxprEqn] = []
    for eqn in eqns:
        arrays = any(num_elements_of(var) > 1 for var in eqn.outvars)
        made += _selected(_as_selections(eqn), work) if arrays and _is_cheap_condition(eqn, work) else [eqn]
    return made


def _is_cheap_condition(eqn: JaxprEqn, work: Work) -> bool:
    if eqn.primitive.name != "cond" or eqn.effects:
        return False
    return all(_is_cheap(inner, work) for branch in bodies_of(eqn) for inner in branch.eqns)


def _is_cheap(eqn: JaxprEqn, work: Work) -> bool:
    if is_region(eqn):
        return kind_of(eqn) == "barrier" or _is_cheap_condition(eqn, work)
    elements = sum(num_elements_of(atom) for atom in (*eqn.invars, *eqn.outvars))
    return not eqn.effects and work.of(eqn) <= OPERATIONS * elements


def _as_selections(eqn: JaxprEqn) -> list[JaxprEqn]:
    """The equations of all branches, and a selection for each result."""
    index, *operands = eqn.invars
    branches = bodies_of(eqn)
    made: list[JaxprEqn] = []
    results: list[list[Any]] = []
    for branch in branches:
        eqns, outvars = substitute(branch, operands)
        made += eqns
        results.append(outvars)
    # `cond` takes the nearest branch where there is none of the number; of two, a selection is told by a flag.
    last = len(branches) - 1
    clamped, (which,) = inline_function(
        (lambda k: k > 0) if last == 1 else (lambda k: jnp.clip(k, 0, last)), [index], eqn.source_info
    )
    made += clamped
    for var, choices in zip(eqn.outvars, zip(*results, strict=True), strict=True):
        (select,), _ = inline_function(
            lambda which, *choices: lax.select_n(which, *choices), [which, *choices], eqn.source_info
        )
        made.append(replace_eqn(select, outvars=[var]))
    return made
