"""Results that are no arrays."""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar


class Phase(enum.Enum):
    TRAIN = 1


def train_step(weights, batch):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(weights)
    told = {"name": "train", "loss": loss, "phase": Phase.TRAIN, "act": jnp.tanh, "kind": np.float32, "none": None}
    return weights - grad, told, "end"


@pytest.mark.parametrize(
    "method", [autopar.ShardParallel(), autopar.PipelineParallel(2, num_microbatches=2)], ids=["one", "two"]
)
def test_text_and_functions_come_out_as_they_are(method):
    step = autopar.parallelize(train_step, method=method)
    weights, batch = jnp.ones((8, 4)), jnp.ones((16, 8))
    for _ in range(2):
        weights, told, end = step(weights, batch)
    assert [told.pop(name) for name in ("name", "phase", "act", "kind", "none")] == [
        "train", Phase.TRAIN, jnp.tanh, np.float32, None,
    ]  # fmt: skip
    assert end == "end" and list(told) == ["loss"] and weights.shape == (8, 4)


def test_other_objects_are_refused_as_by_jit():
    step = autopar.parallelize(lambda w, x: (w - x.sum(), object()), method=autopar.ShardParallel())
    with pytest.raises(TypeError, match="not a valid JAX type"):
        step(jnp.ones(4), jnp.ones((8, 4)))


def test_an_error_of_the_step_is_told_once():
    step = autopar.parallelize(lambda w, x: w - x.sum(where=1, nonsense=2), method=autopar.ShardParallel())
    with pytest.raises(TypeError, match="nonsense") as raised:
        step(jnp.ones(4), jnp.ones((8, 4)))
    assert raised.value.__cause__ is None and raised.value.__suppress_context__
