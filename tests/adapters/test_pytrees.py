"""Frameworks whose steps take pytrees: linen's train state, Haiku with keys that the net does not use, Keras."""

from __future__ import annotations

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import autopar
from tests.adapters.test_nnx import METHODS, batches


def check(step, state, method, **extra):
    ours, jitted = autopar.parallelize(step, method=method), jax.jit(step)
    got = expected = state
    for batch in batches():
        got, loss = ours(got, batch, **extra)
        expected, other = jitted(expected, batch, **extra)
        np.testing.assert_allclose(loss, other, rtol=1e-5)
    assert jax.tree.structure(got) == jax.tree.structure(expected) and len(ours._made.compiled) <= 2
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)
    return ours.plan(got, batches()[0], **extra)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16)(nn.LayerNorm()(jnp.tanh(nn.Dense(16)(x))))


class StateWithMetrics(TrainState):
    """As in linen's "Getting started": sums and counts, divided outside of the step."""

    metrics: dict


def add_metrics(state, predicted, batch, loss):
    right = jnp.sum(predicted.argmax(-1) == batch["y"].argmax(-1))
    new = {"right": right, "samples": predicted.shape[0], "loss": loss, "steps": 1}
    return state.replace(metrics=jax.tree.map(jnp.add, state.metrics, new))


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_linen_train_state(method):
    def step(state, batch):
        def loss_fn(params):
            predicted = state.apply_fn({"params": params}, batch["x"])
            return jnp.mean((predicted - batch["y"]) ** 2), predicted

        (loss, predicted), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return add_metrics(state.apply_gradients(grads=grads), predicted, batch, loss), loss

    def compute_metrics(*, state, batch):
        predicted = state.apply_fn({"params": state.params}, batch["x"])
        return add_metrics(state, predicted, batch, jnp.mean((predicted - batch["y"]) ** 2))

    params = Linen().init(jax.random.key(0), jnp.zeros((1, 16)))["params"]
    metrics = {"right": jnp.int32(0), "samples": jnp.int32(0), "loss": jnp.float32(0), "steps": jnp.int32(0)}
    adam = optax.adam(1e-2, eps=1e-3)
    state = StateWithMetrics.create(apply_fn=Linen().apply, params=params, tx=adam, metrics=metrics)
    plan = check(step, state, method)
    ours = autopar.parallelize(compute_metrics, method=method)
    got, expected = (run(state=state, batch=batches()[0]).metrics for run in (ours, compute_metrics))
    for sums, count in (("right", "samples"), ("loss", "steps")):
        np.testing.assert_allclose(got[sums] / got[count], expected[sums] / expected[count], rtol=1e-5)
    assert "state/params/Dense_0/kernel" in {value.name for value in plan.values}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_haiku_with_a_key_that_is_not_used(method):
    net = hk.transform(lambda x: hk.nets.MLP([16, 16])(x))

    def step(params, batch, rng):
        def loss_fn(params):
            return jnp.mean((net.apply(params, rng, batch["x"]) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params = net.init(jax.random.PRNGKey(0), jnp.zeros((1, 16)))
    plan = check(step, params, method, rng=jax.random.PRNGKey(1))
    assert {value.name: value.role for value in plan.values}["rng"] == "argument"
