"""The MLP of the overhead benchmarks: matrix products only, plain gradient descent.

In:     its sizes.
Out:    `make_step`: a train step, parameters, a batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def make_step(width: int, layers: int, batch_size: int):
    """So many layers of one width."""

    def train_step(params, batch):
        def loss_fn(params):
            x = batch["x"]
            for kernel in params:
                x = jnp.tanh(x @ kernel)
            return jnp.mean((x - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], loss

    keys = jax.random.split(jax.random.key(0), layers)
    params = [jax.random.normal(k, (width, width)) / width**0.5 for k in keys]
    random = np.random.default_rng(0)
    batch = {name: np.asarray(random.normal(size=(batch_size, width)), np.float32) for name in ("x", "y")}
    return train_step, params, batch
