"""The smallest step with layers: products and tanh, mean squares, gradient descent.

Out:    `train_step(params, batch)`; parameters are a list of kernels, the batch has `x` and `y`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def train_step(params, batch):
    def loss_fn(params):
        x = batch["x"]
        for kernel in params:
            x = jnp.tanh(x @ kernel)
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def make_batch(samples, width):
    random = np.random.default_rng(0)
    return {name: random.normal(size=(samples, width)).astype(np.float32) for name in ("x", "y")}


def make_params(num_layers, width):
    random = np.random.default_rng(1)
    return [random.normal(size=(width, width)).astype(np.float32) / np.sqrt(width) for _ in range(num_layers)]
