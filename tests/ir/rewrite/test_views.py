"""Arguments in another shape are made where they are read, not held beside the argument."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.ir.dataflow import inputs_of
from autopar.ir.rewrite.views import views_of_arguments
from autopar.ir.split.rounds.stage_phases import whole_batch
from autopar.ir.trace.state import find_roles
from autopar.ir.trace.trace import trace_step
from tests.ir.traced import split_microbatches

RNG = np.random.default_rng(0)
KERNEL, BIAS = RNG.normal(size=(8, 4, 6)).astype(np.float32), RNG.normal(size=24).astype(np.float32)
X = RNG.normal(size=(8, 8)).astype(np.float32)


def step(params, batch):
    """A dense layer over several dims, as libraries write it; the kernel's other shape is also handed out."""

    def loss_fn(params):
        kernel = params["kernel"].reshape(8, 24)
        return jnp.mean(jnp.tanh(batch @ kernel + params["bias"][None]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss, params["kernel"].reshape(4, 48)


def program():
    found = trace_step(step, ({"kernel": KERNEL, "bias": BIAS}, X))
    return found, find_roles(found, (1,))


def test_which_are():
    def shapes(x, y):
        wide = jnp.broadcast_to(x, (3, *x.shape))
        return x.reshape(2, -1)[:, None], wide, x.T.reshape(-1), (x + y).reshape(-1)

    jaxpr = trace_step(shapes, (X, X)).jaxpr
    assert {tuple(var.aval.shape) for var in views_of_arguments(jaxpr)} == {(2, 32), (2, 1, 32)}


@pytest.mark.parametrize("count", [1, 4])
def test_made_in_the_loop(count):
    found, roles = program()
    split = (
        split_microbatches(found.jaxpr, count, roles.batch) if count > 1 else whole_batch(found.jaxpr, roles.batch)[1]
    )
    views = views_of_arguments(found.jaxpr)
    assert len(views) == 3 and views.keys().isdisjoint(split.invariants)
    assert "reshape" in [eqn.primitive.name for eqn in split.loop.eqns]


def test_numbers_in_the_shape_of_an_array_are_made_in_the_loop():
    """A pipeline would keep the zeros of each `relu` from before its loop on."""

    def clipped(params, batch):
        grads = jax.grad(lambda w: jnp.sum(jnp.where(batch @ w > 0, batch @ w, jnp.zeros((8, 24)))))(params)
        return params - 0.1 * grads

    found = trace_step(clipped, (KERNEL.reshape(8, 24), X))
    _, split = whole_batch(found.jaxpr, find_roles(found, (1,)).batch)
    made = {var.aval.shape for eqn in split.loop.eqns if not inputs_of(eqn) for var in eqn.outvars}
    assert not split.before and (8, 24) in made


@pytest.mark.parametrize("count", [1, 4])
def test_the_values_are_the_same(count):
    params = {"kernel": KERNEL, "bias": BIAS}
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=count)
    parallel = autopar.parallelize(step, method=method, batch_argnums=(1,))
    want, got = jax.jit(step)(params, X), parallel(params, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
