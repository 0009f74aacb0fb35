"""Conditions taken apart: the same values, and what belongs together is in one condition."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar._jax import make_jaxpr
from autopar.ir.check import check_program
from autopar.ir.region import region_of
from autopar.ir.rewrite.fission import cut_after_gradients, fission, merge_conditions
from autopar.ir.trace.trace import trace_step
from tests.ir.traced import evaluate, split_microbatches, traced


def three_ways(state, batch):
    """Scaled, turned, or the same for all."""
    branches = [lambda x: 2 * x, lambda x: x[::-1], lambda x: jnp.full_like(x, x.sum())]
    return lax.switch(state, branches, batch)


def skipped_update(state, batch):
    """As where gradients are not finite: one flag for many arrays, of which some stay."""
    flag, (weights, moments, count) = state
    grads = jnp.tanh(batch)

    def update(_):
        new = 0.9 * moments + grads
        return weights - 0.1 * new / jnp.sqrt((new**2).sum()), new, count + 1

    return lax.cond(flag, update, lambda _: (weights, moments, count), None)


def one_in_another(state, batch):
    flag, other = state

    def inner(x):
        return lax.cond(other, lambda x: x + 1, lambda x: x - 1, x)

    return lax.cond(flag, inner, lambda x: 3 * x, batch)


def clipped_updates(state, batch):
    """Two parameters, each with its moments; a norm over both gradients, a step counter, a learning rate made of it."""
    flag, params, moments, count = state
    grads = [jnp.tanh(p) * batch for p in params]

    def update(_):
        scale = 1 / jnp.sqrt(sum((g**2).sum() for g in grads))
        new = [0.9 * m + scale * g for m, g in zip(moments, grads, strict=True)]
        rate = 0.1 / (1 + count.astype(jnp.float32))
        return [p - rate * m for p, m in zip(params, new, strict=True)], new, count + 1

    return lax.cond(flag, update, lambda _: (params, moments, count), None)


def line_search(state, batch):
    """A number of each branch serves several results of it."""
    flag, length = state

    def shorter(x):
        length_now = length / 2
        return x * length_now, jnp.tanh(x) + length_now, length_now

    def longer(x):
        length_now = 2 * length + 1
        return x - length_now, x / length_now, length_now

    return lax.cond(flag, shorter, longer, batch)


def heavy(state, batch):
    """One factorization serves both results, and another one neither."""

    def solve(x):
        root = jnp.linalg.cholesky(x @ x.T + jnp.eye(x.shape[0]))
        return root @ x, root.T @ x, 2 * x

    return lax.cond(state, solve, lambda x: (x, -x, x), batch)


BATCH = np.linspace(-2, 2, 12, dtype=np.float32).reshape(4, 3)
STATES = {
    three_ways: [np.int32(k) for k in (-3, 0, 1, 2, 7)],
    skipped_update: [(np.bool_(k), (BATCH + 1, BATCH * 2, np.int32(5))) for k in (False, True)],
    one_in_another: [(np.bool_(a), np.bool_(b)) for a in (False, True) for b in (False, True)],
}


STATES[clipped_updates] = [
    (np.bool_(k), [BATCH + 1, BATCH - 2], [BATCH * 2, BATCH * 3], np.int32(5)) for k in (False, True)
]
STATES[line_search] = [(np.bool_(k), np.float32(3)) for k in (False, True)]
STATES[heavy] = [np.bool_(False), np.bool_(True)]
CONDITIONS = {three_ways: 1, skipped_update: 2, one_in_another: 1, clipped_updates: 3, line_search: 3, heavy: 2}
"""Weights and their moments are one, numbers another; the two solutions are one, and what is only scaled another."""


def apart(step, state):
    program = trace_step(step, (state, BATCH))
    jaxpr = fission(program.jaxpr)
    check_program(jaxpr)
    return program, jaxpr


def run(program, jaxpr, state, batch=BATCH):
    return evaluate(jaxpr, *program.flatten_inputs(jax.tree.leaves((state, batch))))


def conditions(jaxpr):
    return [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "cond"]


@pytest.mark.parametrize("step", STATES, ids=lambda step: step.__name__)
def test_same_values(step):
    for state in STATES[step]:
        program, jaxpr = apart(step, state)
        assert len(conditions(jaxpr)) == CONDITIONS[step]
        for got, want in zip(run(program, jaxpr, state), jax.tree.leaves(jax.jit(step)(state, BATCH)), strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def test_what_is_not_taken_may_be_no_number():
    """Nothing of the other branch is taken, not even what is no number in front of it."""
    state = np.bool_(False), [BATCH * np.nan, BATCH], [BATCH, BATCH], np.int32(0)
    program, jaxpr = apart(clipped_updates, state)
    _, second, *moments, count = run(program, jaxpr, state)
    for kept in (second, *moments):
        np.testing.assert_array_equal(kept, BATCH)
    assert count == 0


def test_numbers_are_made_in_front():
    """The norm and the rate are made once; no condition reads the gradients of another one's parameter."""
    _, jaxpr = apart(clipped_updates, STATES[clipped_updates][0])
    outside = [eqn.primitive.name for eqn in jaxpr.eqns]
    assert outside.count("reduce_sum") == 2 and "sqrt" in outside
    arrays = [sum(b.operand.aval.shape == BATCH.shape for b in region_of(eqn).consts) for eqn in conditions(jaxpr)]
    assert sorted(arrays) == [0, 3, 3]  # parameter, moment, gradient


def test_conditions_together_again():
    """Small ones that can be done at once are one; those as large as the largest stay apart, to hold less at a time."""
    for state in STATES[clipped_updates]:
        program, jaxpr = apart(clipped_updates, state)
        joined = make_jaxpr(jaxpr.invars, jaxpr.outvars, merge_conditions(jaxpr.eqns))
        check_program(joined)
        assert len(conditions(joined)) == 2
        pairs = zip(run(program, joined, state), run(program, jaxpr, state), strict=True)
        for got, want in pairs:
            np.testing.assert_array_equal(got, want)


def curvature_now_and_then(state, batch):
    """As Sophia: every few steps a product with the Hessian, and of that an average."""
    weights, curvature, count = state

    def loss(weights):
        return jnp.mean(jnp.tanh(batch @ weights) ** 2)

    def measured(curvature):
        signs = jnp.where(weights > 0, 1.0, -1.0)
        product = jax.jvp(jax.grad(loss), (weights,), (signs,))[1] * signs
        return 0.9 * curvature + 0.1 * product**2

    curvature = lax.cond(count % 2 == 0, measured, lambda curvature: curvature, curvature)
    return (weights - jax.grad(loss)(weights) / (curvature + 1), curvature, count + 1), loss(weights)


def test_conditions_end_behind_products_with_the_hessian():
    """What microbatches add up is the product, and not what the branch makes of it."""
    random = np.random.default_rng(0)
    state = random.normal(size=(6, 2)).astype(np.float32), np.ones((6, 2), np.float32), np.int32(0)
    batch = random.normal(size=(8, 6)).astype(np.float32)
    jaxpr = traced(curvature_now_and_then, state, batch)
    cut = cut_after_gradients(jaxpr)
    check_program(cut)
    split = split_microbatches(cut, 4, (3,))
    assert [sum(eqn.primitive.name == "cond" for eqn in eqns) for eqns in (split.loop.eqns, split.after)] == [1, 1]
    with pytest.raises(autopar.errors.MicrobatchError):
        split_microbatches(jaxpr, 4, (3,))
    for actual, expected in zip(evaluate(cut, *state, batch), evaluate(jaxpr, *state, batch), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
