"""One small MLP with momentum, planned once for a machine that nobody owns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import Cluster, Device, Link, ShardParallel

NUM_LAYERS, WIDTH, BATCH = 4, 32, 256
CLUSTER = Cluster(
    hosts=1,
    devices_per_host=8,
    device=Device("toy", peak_flops=40e6, memory_bytes=1e6, memory_bytes_per_second=1e9),
    intra=Link(1e-6, 1e6),
    inter=Link(1e-6, 1e6),
)


def loss_fn(params, batch):
    x = batch["x"]
    for layer in params["layers"]:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return jnp.mean((x - batch["y"]) ** 2)


def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
    return {"params": params, "momentum": momentum}, loss


def arguments(batch=BATCH, width=WIDTH, num_layers=NUM_LAYERS):
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {"layers": [{"kernel": array(width, width), "bias": array(width)} for _ in range(num_layers)]}
    return {"params": params, "momentum": params}, {"x": array(batch, width), "y": array(batch, width)}


@pytest.fixture(scope="session")
def make_step():
    """`make_step(method, cluster)`: the MLP's step."""

    def make(method=None, cluster=CLUSTER, fn=train_step):
        return autopar.parallelize(fn, cluster=cluster, method=method or ShardParallel(mesh_shape=(2, 4)))

    return make


@pytest.fixture(scope="session")
def types():
    """`types(batch, width)`: types of the step's arguments."""
    return arguments


@pytest.fixture(scope="session")
def plan(make_step):
    """The MLP planned on (2, 4)."""
    return make_step().plan(*arguments())
