"""How the rows of each value lie, in a program that sorts rows in parts."""

import jax
import jax.numpy as jnp
import pytest

from autopar._jax import Var
from autopar.ir.split.sorted_rows.ordered import Counts, Ordering, RowOrder, Rows
from autopar.ir.trace.trace import trace_step

ROWS, WIDTH, GROUPS, PARTS = 8, 4, 3, 2
X, KEY = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32), jax.ShapeDtypeStruct((ROWS,), jnp.uint32)
W = jax.ShapeDtypeStruct((GROUPS, WIDTH, WIDTH), jnp.float32)


def lies(function) -> RowOrder | str:
    """How the result of a function of rows, weights and a key lies; "refused": another order would give another one."""
    jaxpr = trace_step(function, [X, W, KEY]).jaxpr
    ordering, known = Ordering(jaxpr, PARTS), dict[Var, RowOrder]()
    for eqn in jaxpr.eqns:
        operands = [known.get(a) if isinstance(a, Var) else None for a in eqn.invars]
        found = ordering.transfer(eqn, operands)
        if found is None and any(isinstance(rows, Rows) for rows in operands):
            return "refused"
        known.update(zip(eqn.outvars, found.results if found else [None] * len(eqn.outvars), strict=True))
    return known.get(jaxpr.outvars[0])


def product(x, w, key):
    order = jnp.argsort(key)
    return jax.lax.ragged_dot(x[order], w, jnp.bincount(key, length=GROUPS).astype(jnp.int32))


@pytest.mark.parametrize(
    "function, wanted",
    [
        (lambda x, w, key: jnp.argsort(key), Rows(0, order=0, places=0)),
        (lambda x, w, key: x[jnp.argsort(key)], Rows(0, order=0)),
        (lambda x, w, key: jnp.tanh(x[jnp.argsort(key)].T), Rows(1, order=0)),
        (lambda x, w, key: x[jnp.argsort(key)] * jnp.float32(2), Rows(0, order=0)),
        (product, Rows(0, order=0)),
        (lambda x, w, key: (jnp.bincount(key, length=GROUPS), jnp.argsort(key)), Counts(0)),
    ],
    ids=["places", "taken", "turned", "by themselves", "multiplied in groups", "counted"],
)
def test_rows_in_the_order_of_a_key(function, wanted):
    assert lies(function) == wanted


@pytest.mark.parametrize(
    "back",
    [
        lambda h, order: h[jnp.argsort(order)],
        lambda h, order: jnp.zeros_like(h).at[order].set(h),
        lambda h, order: jnp.zeros_like(h).at[order].add(h),
    ],
    ids=["taken", "written", "added"],
)
def test_rows_that_are_put_back_are_as_they_were(back):
    assert lies(lambda x, w, key: back(product(x, w, key), jnp.argsort(key))) is None


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, key: jnp.cumsum(x[jnp.argsort(key)], 0),
        lambda x, w, key: jnp.flip(x[jnp.argsort(key)], 0),
        lambda x, w, key: x[jnp.argsort(key)] + x,
        lambda x, w, key: x[jnp.argsort(key)].reshape(ROWS // 2, 2, WIDTH),
        lambda x, w, key: x[jnp.argsort(key)][: ROWS // 2],
        lambda x, w, key: x[jnp.argsort(key)[::-1]],
    ],
    ids=["summed up so far", "turned round", "met by others", "in pairs", "the first", "taken the other way"],
)
def test_what_another_order_would_change_is_refused(function):
    assert lies(function) == "refused"


def test_of_rows_that_do_not_divide_none_are_sorted_in_parts():
    few = jax.ShapeDtypeStruct((ROWS + 1,), jnp.uint32)
    jaxpr = trace_step(lambda key: jnp.argsort(key), [few]).jaxpr
    assert Ordering(jaxpr, PARTS).key_of == {}
