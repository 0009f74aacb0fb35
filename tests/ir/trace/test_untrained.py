"""A step that takes a gradient of which nothing comes back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.errors import StateError

PARAMS = {"b": jax.ShapeDtypeStruct((8,), "float32"), "w": jax.ShapeDtypeStruct((8, 8), "float32")}
BATCH = {"x": jax.ShapeDtypeStruct((16, 8), "float32")}
RATE = jax.ShapeDtypeStruct((), "float32")


def gradient(params, batch):
    return jax.value_and_grad(lambda p: jnp.mean((batch["x"] @ p["w"] + p["b"]) ** 2))(params)


def updated(params, grads, rate=0.1):
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def forgotten(params, batch):
    loss, grads = gradient(params, batch)
    updated(params, grads)
    return loss


def forgotten_in_a_jit(params, batch):
    return jax.jit(forgotten)(params, batch)


def forgotten_with_a_rate(params, batch, rate):
    loss, grads = gradient(params, batch)
    updated(params, grads, rate)
    return loss


def forgotten_beside_a_reconstruction(params, x):
    return forgotten(params, {"x": x}), x @ params["w"]


@pytest.mark.parametrize(
    "step, args",
    [
        (forgotten, (PARAMS, BATCH)),
        (forgotten_in_a_jit, (PARAMS, BATCH)),
        (forgotten_with_a_rate, (PARAMS, BATCH, RATE)),
        (forgotten_beside_a_reconstruction, (PARAMS, BATCH["x"])),
        (lambda w, batch: forgotten({**PARAMS, "b": 0.0, "w": w}, batch), (PARAMS["w"], BATCH)),
    ],
)
def test_state_forgotten_in_the_result(step, args):
    with pytest.raises(StateError, match="(?s)trains nothing.*no argument comes back.*test_untrained.py:") as caught:
        autopar.parallelize(step).plan(*args)
    assert {"params/b", "params/w"} == set(caught.value.paths) or caught.value.paths[0] == "w"


def no_gradient(params, batch):
    return jnp.mean(batch["x"] @ params["w"])


def gradients_alone(params, batch):
    return gradient(params, batch)


def in_other_containers(state, batch):
    loss, grads = gradient(state["params"], batch)
    return list(updated(state["params"], grads).values()), loss


def a_part(state, batch):
    loss, grads = gradient(state["params"], batch)
    return {"new": updated(state["params"], grads)}, loss


@pytest.mark.parametrize(
    "step, state",
    [
        (no_gradient, PARAMS),
        (gradients_alone, PARAMS),
        (in_other_containers, {"params": PARAMS}),
        (a_part, {"params": PARAMS, "step": jax.ShapeDtypeStruct((), "int32")}),
    ],
)
def test_what_trains_something(step, state):
    assert autopar.parallelize(step, method=autopar.ShardParallel((8,)), batch_argnums=1).plan(state, BATCH)


def test_the_gradient_may_be_wanted_for_itself():
    step = autopar.parallelize(forgotten, method=autopar.ShardParallel((8,)), batch_argnums=1, donate_argnums=())
    assert step.plan(PARAMS, BATCH)
