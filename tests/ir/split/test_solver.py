"""Placements followed through small programs, forwards by the solver and backwards by demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar._jax import Jaxpr
from autopar.ir.build import flat_function
from autopar.ir.split.demand import Demand
from autopar.ir.split.placement import REPLICATED, SUM, Axis, Partial, Placement, Split
from autopar.ir.split.solution import Solution
from autopar.ir.split.solver import Solver, StuckError

ROWS = Split(0)
X, W = jax.ShapeDtypeStruct((8, 4), jnp.float32), jax.ShapeDtypeStruct((4, 4), jnp.float32)


def begun(function: Callable, given: Sequence[Placement]) -> tuple[Jaxpr, Solver]:
    jaxpr, solver = flat_function(function, X, W), Solver(Solution(Axis(2)))
    placed = zip(jaxpr.invars, given, strict=True)
    solver.solution.placement_of.update((var, p) for var, p in placed if p != REPLICATED)
    return jaxpr, solver


def solved(function: Callable, given: Sequence[Placement]) -> tuple[Jaxpr, Solver, list[Placement]]:
    jaxpr, solver = begun(function, given)
    return jaxpr, solver, solver.body(jaxpr)


def scanned(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Layers, of which each adds to a number."""
    return lax.scan(lambda c, row: ((jnp.tanh(c[0] @ w) * row, c[1] + c[0].sum()), None), (x, 0.0), w)[0]


def over_time(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.scan(lambda total, row: (total + row @ w, None), jnp.zeros(4), x)[0]


def branched(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.cond(w[0, 0] > 0, lambda: x @ w, lambda: jnp.zeros_like(x))


def counted(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.fori_loop(0, w[0, 0].astype(int), lambda _, x: x * 2, x)


FOLLOWED = {
    "a product": (lambda x, w: x @ w, [ROWS, REPLICATED], ROWS),
    "a transpose": (lambda x, w: x.T, [ROWS, REPLICATED], Split(1)),
    "a sum": (lambda x, w: x.sum(0), [ROWS, REPLICATED], SUM),
    "of sums": (lambda x, w: 2 * x.sum(0) + x.sum(0), [ROWS, REPLICATED], SUM),
    "a gradient": (lambda x, w: x.T @ x, [ROWS, REPLICATED], SUM),
    "a maximum": (lambda x, w: x.max(0), [ROWS, REPLICATED], Partial("max")),
    "rows of pairs": (lambda x, w: x.reshape(4, 2, 4), [ROWS, REPLICATED], ROWS),
    "behind each other": (lambda x, w: jnp.concatenate([x, x]), [ROWS, REPLICATED], Split(0, 2)),
    "nothing split": (lambda x, w: x @ w, [REPLICATED, REPLICATED], REPLICATED),
    "over time": (over_time, [ROWS, REPLICATED], SUM),
    "branches": (branched, [ROWS, REPLICATED], ROWS),
    "as often as all": (counted, [ROWS, REPLICATED], ROWS),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_followed(name):
    function, given, made = FOLLOWED[name]
    _, _, results = solved(function, given)
    assert results == [made]


def test_carries_settle():
    _, _, results = solved(scanned, [ROWS, REPLICATED])
    assert results == [ROWS, SUM]


STUCK = {
    "of a sum": (lambda x, w: jnp.exp(x.sum(0)), SUM),
    "of a maximum": (lambda x, w: x.max(0) * 2, Partial("max")),
    "sorted samples": (lambda x, w: jnp.sort(x, 0), ROWS),
    "as often as a sample": (lambda x, w: counted(w, x), ROWS),
}


@pytest.mark.parametrize("name", STUCK)
def test_stuck(name):
    """The operand that is blamed is there as it was found."""
    function, blamed = STUCK[name]
    jaxpr, solver = begun(function, [ROWS, REPLICATED])
    with pytest.raises(StuckError) as stuck:
        solver.body(jaxpr)
    assert solver.solution.of(stuck.value.cause.operand) == blamed


def test_demand_makes_masks_in_parts():
    """A mask over samples is whole; read by split samples alone, each shard makes its own rows of it."""

    def masked(x, w):
        return x * (jnp.arange(8) % 3 == 0)[:, None]

    jaxpr, solver, results = solved(masked, [ROWS, REPLICATED])
    made = [var for eqn in jaxpr.eqns if eqn.primitive.name == "iota" for var in eqn.outvars]
    assert results == [ROWS] and solver.solution.made_as(made[0]) == REPLICATED
    Demand(solver.solution, solver.strategies).body(jaxpr, {jaxpr.outvars[0]: {ROWS: None}})
    assert solver.solution.made_as(made[0]) == ROWS


def test_demand_leaves_whole_what_is_also_read_whole():
    def masked(x, w):
        mask = (jnp.arange(8) % 3 == 0)[:, None]
        return x * mask, mask

    jaxpr, solver, _ = solved(masked, [ROWS, REPLICATED])
    made = [var for eqn in jaxpr.eqns if eqn.primitive.name == "iota" for var in eqn.outvars]
    uses = {jaxpr.outvars[0]: {ROWS: None}, jaxpr.outvars[1]: {REPLICATED: None}}
    Demand(solver.solution, solver.strategies).body(jaxpr, uses)
    assert solver.solution.made_as(made[0]) == REPLICATED
