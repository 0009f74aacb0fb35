"""Along which dims of what a step reads samples lie."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autopar.ir.split.rounds.steps import dims_of_samples, is_loop_of_steps
from autopar.ir.trace.trace import trace_step


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def loss(w, rows):
    return jnp.mean(jnp.tanh(rows @ w) ** 2)


def one(w, rows):
    value, grad = jax.value_and_grad(loss)(w, rows)
    return w - 0.1 * grad, value


def steps(w, rows):
    return jax.lax.scan(one, w, rows)


def scaled(w, rows):
    """A cast and a scale before the loop, a rate for each step beside it."""
    return jax.lax.scan(one, w, (rows.astype(jnp.bfloat16) / 255).astype(jnp.float32))


def epochs(w, rows):
    return jax.lax.scan(lambda w, _: steps(w, rows), w, jnp.arange(2))


def of_epochs(w, rows):
    return jax.lax.scan(steps, w, rows)


def summed(w, rows):
    """The user's own microbatches."""
    total, _ = jax.lax.scan(lambda g, x: (g + jax.grad(loss)(w, x), None), jnp.zeros_like(w), rows)
    return w - total


def summed_in_steps(w, rows):
    return jax.lax.scan(lambda w, rows: (summed(w, rows), None), w, rows)


def read_twice(w, rows):
    """Also as a whole: what its rows are cannot be told from the loop."""
    w, values = steps(w, rows)
    return w, values + jnp.sum(jnp.sort(rows, 0))


def layers(w, rows):
    """A loop without gradients is no loop of steps."""
    return jax.lax.scan(lambda h, x: (jnp.tanh(h + x @ w), None), rows[0] * 0, rows)


@pytest.mark.parametrize(
    "fun, shape, dims",
    [
        (one, (16, 8), {0}),
        (steps, (3, 16, 8), {1}),
        (scaled, (3, 16, 8), {1}),
        (epochs, (3, 16, 8), {1}),
        (of_epochs, (2, 3, 16, 8), {2}),
        (summed, (3, 16, 8), {0, 1}),
        (summed_in_steps, (2, 3, 16, 8), {1, 2}),
        (read_twice, (3, 16, 8), {0}),
        (layers, (3, 8, 8), {0}),
    ],
)
def test_dims(fun, shape, dims):
    jaxpr = trace_step(fun, (array(8, 8), array(*shape))).jaxpr
    assert dims_of_samples(jaxpr, jaxpr.invars[1:]) == {jaxpr.invars[1]: frozenset(dims)}


def test_a_number_for_each_step_is_no_sample():
    def fun(w, rates):
        return jax.lax.scan(lambda w, rate: (w - rate * jax.grad(loss)(w, jnp.ones((4, 8))), None), w, rates)[0]

    jaxpr = trace_step(fun, (array(8, 8), array(3))).jaxpr
    assert dims_of_samples(jaxpr, jaxpr.invars[1:]) == {jaxpr.invars[1]: frozenset()}


def test_a_sum_of_gradients_is_no_loop_of_steps():
    for fun, wanted in ((steps, [True]), (summed, [False])):
        eqns = trace_step(fun, (array(8, 8), array(3, 16, 8))).jaxpr.eqns
        assert [is_loop_of_steps(eqn) for eqn in eqns if eqn.primitive.name == "scan"] == wanted
