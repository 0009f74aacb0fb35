"""Steps under `jax_enable_x64`: numbers of 64 bits, and Python's numbers among those of 32."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.case import Case
from tests.models.registry import CASES
from tests.pipeline_sweep import check_pipeline
from tests.sweep import check_case


@pytest.fixture(autouse=True)
def sixty_four_bits():
    with jax.enable_x64(True):
        yield


def doubles() -> Case:
    """Two layers in float64, an int64 counter, a history written in one place, NaN in what is largest."""

    def step(state, batch):
        def loss(params):
            return jnp.mean((jnp.tanh(batch["x"] @ params["a"]) @ params["b"]) ** 2)

        value, gradient = jax.value_and_grad(loss)(state["params"])
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], gradient)
        seen = state["seen"] + (batch["label"] > 2).sum()
        history = jnp.roll(state["history"], 1).at[0].set(jnp.abs(batch["x"]).max())
        metrics = {"loss": value, "largest": batch["x"].at[3, 2].set(jnp.nan).max(0), "half": value.astype(jnp.float32)}
        return {"params": params, "seen": seen, "history": history}, metrics

    random = np.random.default_rng(0)
    state = {
        "params": {"a": jnp.asarray(random.normal(size=(8, 16))), "b": jnp.asarray(random.normal(size=(16, 8)))},
        "seen": jnp.int64(2**40),
        "history": jnp.zeros(8),
    }
    batches = [{"x": random.normal(size=(16, 8)), "label": random.integers(0, 8, 16)} for _ in range(3)]
    assert state["params"]["a"].dtype == jnp.float64
    return Case("doubles", step, state, tuple(batches), tolerance=1e-13)


@pytest.mark.parametrize("method, microbatches", [("zero3", 1), ("random0", 1), ("random1", 4)])
def test_one_mesh(method, microbatches):
    check_case(doubles(), (8,), method, microbatches)


def test_in_microbatches_between_stages():
    check_pipeline(doubles(), "2", "1f1b", 4)


@pytest.mark.parametrize("name, schedule", [("mlp_multisteps", "1f1b"), ("moe_top2_capacity", "gpipe")])
def test_models_of_32_bits(name, schedule):
    case = CASES[name]()
    check_pipeline(dataclasses.replace(case, name=f"{name}, 64 bits"), "2", schedule, 4)
