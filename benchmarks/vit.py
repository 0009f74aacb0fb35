"""The vision transformer of the benchmarks: plain pytrees, AdamW, scanned layers; a class token, so 197 of them.

In:     `Config`.
Out:    `make_step`: a train step and the types of its arguments; nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from parts import apply, dense_params, make_train_step, norm_params, normalize, state_types


@dataclass(frozen=True)
class Config:
    """Sizes; the defaults are ViT-B/16's (Dosovitskiy et al., ICLR 2021, table 1)."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    pixels: int = 224
    patch: int = 16
    classes: int = 1000
    batch: int = 256
    dtype: Any = jnp.bfloat16


def make_step(config: Config) -> tuple[Callable[..., Any], Any, Any]:
    """The step, and the types of its state and batch."""
    optimizer = optax.adamw(1e-3, weight_decay=0.1)
    train_step = make_train_step(partial(loss_of, config=config), optimizer)
    state = state_types(jax.eval_shape(partial(init_params, config)), optimizer)
    images = jax.ShapeDtypeStruct((config.batch, config.pixels, config.pixels, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((config.batch,), jnp.int32)
    return train_step, state, {"images": images, "labels": labels}


def init_params(config: Config) -> Any:
    """Parameters; those of the layers stacked."""
    width, lead = config.width, (config.layers,)
    patches = (config.pixels // config.patch) ** 2
    return {
        "patches": dense_params(3 * config.patch**2, width),
        "class": jnp.zeros((1, 1, width)),
        "positions": jnp.zeros((patches + 1, width)),
        "layers": {
            "norm1": norm_params(width, lead),
            "qkv": dense_params(width, 3 * width, lead),
            "out": dense_params(width, width, lead),
            "norm2": norm_params(width, lead),
            "up": dense_params(width, 4 * width, lead),
            "down": dense_params(4 * width, width, lead),
        },
        "norm": norm_params(width),
        "head": dense_params(width, config.classes),
    }


def loss_of(params: Any, batch: Any, config: Config) -> jax.Array:
    """Mean cross entropy."""
    count, side, size = config.batch, config.pixels // config.patch, config.patch
    patches = batch["images"].astype(config.dtype).reshape(count, side, size, side, size, 3)
    x = apply(params["patches"], patches.transpose(0, 1, 3, 2, 4, 5).reshape(count, side * side, -1))
    first = jnp.broadcast_to(params["class"].astype(config.dtype), (count, 1, config.width))
    x = jnp.concatenate([first, x], 1) + params["positions"].astype(config.dtype)

    def block(x, layer):
        x = x + apply(layer["out"], attention(apply(layer["qkv"], normalize(layer["norm1"], x)), config.heads))
        return x + apply(layer["down"], jax.nn.gelu(apply(layer["up"], normalize(layer["norm2"], x)))), None

    x, _ = lax.scan(block, x, params["layers"])
    logits = apply(params["head"], normalize(params["norm"], x)[:, 0]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def attention(qkv: jax.Array, heads: int) -> jax.Array:
    """Attention of every token to every other."""
    count, tokens, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    query, key, value = (part.reshape(count, tokens, heads, -1) for part in jnp.split(qkv, 3, -1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / (width // heads) ** 0.5
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value).reshape(count, tokens, width)
