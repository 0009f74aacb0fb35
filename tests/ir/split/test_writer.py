"""What one shard does, as a program: on its rows it makes its rows of what the whole makes, or its term of the sum."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar._jax import make_jaxpr, new_var, shaped
from autopar.ir.build import flat_function
from autopar.ir.check import check_program
from autopar.ir.split.placement import REPLICATED, SUM, Axis, Split
from autopar.ir.split.solution import Solution
from autopar.ir.split.solver import Solver
from autopar.ir.split.writer import Programs, ShardWriter, barrier_apart
from tests.ir.traced import evaluate

COUNT = 2
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(4, 4)).astype(np.float32)


def layers(x, w):
    return lax.scan(lambda c, row: ((jnp.tanh(c[0] @ w) * row, c[1] + c[0].sum()), c[0].sum(0)), (x, 0.0), w)


def branches(x, w):
    return lax.cond(w[0, 0] > 0, lambda: x @ w, lambda: x * 2), (x.T @ x)


def loop(x, w):
    return lax.fori_loop(0, 3, lambda _, x: x + jnp.sin(x), x) @ w


def remat(x, w):
    x, w = lax.optimization_barrier((x, w))
    return jnp.exp(x) @ w


@pytest.mark.parametrize("function", [layers, branches, loop, remat])
def test_shards_are_the_whole(function):
    jaxpr = flat_function(lambda x, w: jax.tree.leaves(function(x, w)), X, W)
    solution = Solution(Axis(COUNT))
    solution.placement_of[jaxpr.invars[0]] = Split(0)
    placements = Solver(solution).body(jaxpr)
    number = new_var(shaped(jax.ShapeDtypeStruct((), jnp.int32)))
    writer = ShardWriter(Programs(solution), number)
    inputs = [writer.local(jaxpr.invars[0].aval, Split(0)), new_var(jaxpr.invars[1].aval)]
    for var, placement, local in zip(jaxpr.invars, (Split(0), REPLICATED), inputs, strict=True):
        writer.define(var, placement, local)
    for eqn in jaxpr.eqns:
        writer.equation(eqn)
    outputs = [writer.value(a, p) for a, p in zip(jaxpr.outvars, placements, strict=True)]
    shard = make_jaxpr([number, *inputs], outputs, writer.eqns)
    check_program(shard)
    made = [evaluate(shard, np.int32(k), rows, W) for k, rows in enumerate(np.split(X, COUNT))]
    for whole, placement, parts in zip(evaluate(jaxpr, X, W), placements, zip(*made, strict=True), strict=True):
        assert placement in (Split(0), SUM)
        joined = np.concatenate(parts) if placement == Split(0) else sum(parts)
        np.testing.assert_allclose(joined, whole, rtol=2e-5, atol=1e-5)


def test_barriers_apart():
    """What is whole passes a barrier of its own."""
    jaxpr = flat_function(lambda x, w: lax.optimization_barrier((x, w, x + 1)), X, W)
    barrier = jaxpr.eqns[-1]
    solution = Solution(Axis(COUNT))
    assert barrier_apart(barrier, solution) == [barrier]
    solution.placement_of.update((barrier.outvars[k], Split(0)) for k in (0, 2))
    whole, split = barrier_apart(barrier, solution)
    assert (whole.invars, whole.outvars) == (barrier.invars[1:2], barrier.outvars[1:2])
    assert (split.invars, split.outvars) == (barrier.invars[::2], barrier.outvars[::2])
    solution.placement_of[barrier.outvars[1]] = SUM
    assert barrier_apart(barrier, solution) == [barrier]
