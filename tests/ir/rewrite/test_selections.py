"""Conditions on cheap branches: the same values, no condition; heavy branches stay."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar._jax import eval_jaxpr
from autopar.ir.check import check_program
from autopar.ir.rewrite.selections import branches_as_selections
from autopar.ir.trace.trace import trace_step


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


def heavy(state, batch):
    return lax.cond(state, lambda x: x @ jnp.linalg.cholesky(x @ x.T + jnp.eye(64)), lambda x: x, batch)


BATCH = np.linspace(-2, 2, 12, dtype=np.float32).reshape(4, 3)
STATES = {
    three_ways: [np.int32(k) for k in (-3, 0, 1, 2, 7)],
    skipped_update: [(np.bool_(k), (BATCH + 1, BATCH * 2, np.int32(5))) for k in (False, True)],
    one_in_another: [(np.bool_(a), np.bool_(b)) for a in (False, True) for b in (False, True)],
}


def selected(step, state, batch):
    program = trace_step(step, (state, batch))
    jaxpr = branches_as_selections(program.jaxpr)
    check_program(jaxpr)
    return program, jaxpr


@pytest.mark.parametrize("step", STATES, ids=lambda step: step.__name__)
def test_same_values(step):
    for state in STATES[step]:
        program, jaxpr = selected(step, state, BATCH)
        names = {eqn.primitive.name for eqn in jaxpr.eqns}
        assert "cond" not in names and "select_n" in names
        made = eval_jaxpr(jaxpr, (), *program.flatten_inputs(jax.tree.leaves((state, BATCH))))
        for got, want in zip(made, jax.tree.leaves(jax.jit(step)(state, BATCH)), strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_allclose(got, want, rtol=1e-6)


def test_what_is_not_taken_may_be_no_number():
    """A selection takes nothing of the other branch, not even what is no number."""
    state = np.bool_(False), (BATCH, BATCH * np.nan, np.int32(0))
    program, jaxpr = selected(skipped_update, state, BATCH)
    weights, *_ = eval_jaxpr(jaxpr, (), *program.flatten_inputs(jax.tree.leaves((state, BATCH))))
    np.testing.assert_array_equal(weights, BATCH)


def test_heavy_branches_stay():
    _, jaxpr = selected(heavy, np.bool_(True), np.ones((64, 64), np.float32))
    assert [eqn.primitive.name for eqn in jaxpr.eqns].count("cond") == 1
