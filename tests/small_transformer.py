"""A small transformer as plain functions, its layers in a list or in one scan, trained by gradient descent.

Out:    `train_step(params, batch)`, and the types of its arguments.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

BATCH, LENGTH, WIDTH, HEADS = 8, 16, 32, 4


def norm(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def layer(params, x):
    q, k, v = jnp.split(norm(x) @ params["qkv"], 3, -1)
    q, k, v = (a.reshape(*x.shape[:2], HEADS, WIDTH // HEADS) for a in (q, k, v))
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape) @ params["out"]
    return x + jax.nn.gelu(norm(x) @ params["up"]) @ params["down"]


def train_step(params, batch):
    def loss_fn(params):
        x = batch["x"]
        if isinstance(params, dict):
            x, _ = jax.lax.scan(lambda x, p: (layer(p, x), None), x, params)
        else:
            for p in params:
                x = layer(p, x)
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def types(*lead):
    shapes = {
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }
    return {name: jax.ShapeDtypeStruct((*lead, *shape), jnp.float32) for name, shape in shapes.items()}


def arguments(kind, num_layers, batch=BATCH):
    """Types of parameters and batch; `kind` is "unrolled" or "scan"."""
    data = jax.ShapeDtypeStruct((batch, LENGTH, WIDTH), jnp.float32)
    params = types(num_layers) if kind == "scan" else [types() for _ in range(num_layers)]
    return params, {"x": data, "y": data}
