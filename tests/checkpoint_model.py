"""A small model of stacked layers, and steps of it under several plans, for the tests of checkpoints and of `fit`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar
from autopar.checkpoint.owner import PREFIX

OPTIMIZER = optax.adamw(1e-2)


def create_state():
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "in": jax.random.normal(keys[0], (8, 16)) * 0.3,
        "layers": {"w": jax.random.normal(keys[1], (4, 16, 16)) * 0.2, "b": jnp.zeros((4, 16))},
        "out": jax.random.normal(keys[2], (16, 4)) * 0.3,
    }
    return {"params": params, "opt": OPTIMIZER.init(params), "step": jnp.int32(0)}


def loss_fn(params, batch):
    def layer(x, w):
        return jnp.tanh(x @ w["w"] + w["b"]), None

    x, _ = jax.lax.scan(layer, batch["x"] @ params["in"], params["layers"])
    return jnp.mean((x @ params["out"] - batch["y"]) ** 2)


def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "step": state["step"] + 1}, loss


def batches(count):
    """The same batches in every process."""
    random = np.random.default_rng(7)
    data = random.normal(size=(count, 16, 12)).astype(np.float32)
    return [{"x": each[:, :8], "y": each[:, 8:]} for each in data]


def step_on(num_devices, method, step=train_step):
    """The step under a plan on the first devices."""
    cluster = autopar.Cluster.local(jax.devices()[:num_devices])
    return autopar.parallelize(step, cluster=cluster, method=method)


def there(directory):
    """Names in a directory of checkpoints, but for the mark of this process, which owns it."""
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith(PREFIX))
