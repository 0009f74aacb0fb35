"""Loops of training steps, written out: the same numbers, and no loop of steps left."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar._jax import eval_jaxpr, open_jaxpr
from autopar.ir.rewrite.unrolled_steps import unroll_steps
from autopar.ir.trace.flatten import flatten
from tests.ir.split.cases import primitives_in

W = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32) / 2
ROWS = np.random.default_rng(1).normal(size=(4, 2, 3)).astype(np.float32)


def one(w, rows):
    """A training step of a layer that is used twice, in a scan of its own."""

    def loss_of(w):
        return jnp.sum(lax.scan(lambda x, _: (jnp.tanh(x @ w), None), rows, None, length=2)[0] ** 2)

    loss, grads = jax.value_and_grad(loss_of)(w)
    return w - 0.1 * grads, loss


def forwards(w, rows):
    return lax.scan(one, w, rows)


def backwards(w, rows):
    return lax.scan(one, w, rows, reverse=True)


def epochs(w, rows):
    return lax.scan(lambda w, shift: lax.scan(one, w, rows + shift), w, jnp.arange(2.0))


def summed(w, rows):
    """Gradients that the user adds up: no turn begins where they have led. Nor does it where noise goes from turn to turn."""

    def add(carried, row):
        sums, key = carried
        key, now = jax.random.split(key)
        return (sums + one(w, row + jax.random.normal(now, row.shape))[0], key), None

    return w - lax.scan(add, (jnp.zeros_like(w), jax.random.key(0)), rows)[0][0]


def no_steps(w, rows):
    """A loop that is differentiated, and takes no gradient itself."""
    return jax.value_and_grad(
        lambda w: jnp.sum(lax.scan(lambda x, row: (jnp.tanh(x + row @ w), None), rows[0], rows)[0])
    )(w)


def counted(fun, most):
    flat, consts = flatten(*open_jaxpr(jax.make_jaxpr(fun)(W, ROWS)))
    made = unroll_steps(flat, most)
    results = jax.jit(lambda *args: eval_jaxpr(made, (), *args))(W, ROWS, *consts)
    for got, want in zip(results, jax.tree.leaves(jax.jit(fun)(W, ROWS)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    return primitives_in(flat.eqns)["scan"], primitives_in(made.eqns)["scan"]


@pytest.mark.parametrize("fun, most, turns", [(forwards, 4, 4), (backwards, 4, 4), (epochs, 8, 8)])
def test_written_out(fun, most, turns):
    """What is left are the two scans of each step, forward and backward."""
    assert counted(fun, most)[1] == 2 * turns


@pytest.mark.parametrize("fun, most", [(forwards, 3), (epochs, 7), (summed, 99), (no_steps, 99)])
def test_left_alone(fun, most):
    before, after = counted(fun, most)
    assert before == after
