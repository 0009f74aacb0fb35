"""The T5 of the benchmarks: an encoder and a decoder that attends to it, relative positions, AdamW, layers scanned.

In:     `Config`.
Out:    `make_step`: a train step and the types of its arguments; nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax


@dataclass(frozen=True)
class Config:
    """Sizes; the defaults are T5-large's (Raffel et al., JMLR 2020, sec. 3.1), a batch of 128 pairs."""

    layers: int = 24
    width: int = 1024
    hidden: int = 4096
    heads: int = 16
    vocabulary: int = 32128
    tokens: int = 512
    targets: int = 128
    batch: int = 128
    dtype: Any = jnp.bfloat16


def make_step(config: Config) -> tuple[Callable[..., Any], Any, Any]:
    """The step, and the types of its state and batch."""
    optimizer = optax.adamw(1e-3)

    def train_step(state, batch):
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch, config)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss

    def init():
        params = init_params(config)
        return {"params": params, "opt_state": optimizer.init(params)}

    def ids(length):
        return jax.ShapeDtypeStruct((config.batch, length), jnp.int32)

    return train_step, jax.eval_shape(init), {"source": ids(config.tokens), "target": ids(config.targets)}


def init_params(config: Config) -> Any:
    """Parameters; those of the layers stacked."""
    count, width = config.layers, config.width

    def attention():
        return {
            "norm": jnp.ones((count, width)),
            **{name: jnp.zeros((count, width, width)) for name in ("q", "k", "v", "o")},
        }

    def dense():
        return {
            "norm": jnp.ones((count, width)),
            "up": jnp.zeros((count, width, config.hidden)),
            "down": jnp.zeros((count, config.hidden, width)),
        }

    return {
        "embed": jnp.zeros((config.vocabulary, width)),
        "encoder": {"own": attention(), "dense": dense()},
        "decoder": {"own": attention(), "other": attention(), "dense": dense()},
        "near": jnp.zeros((2, config.heads, 2 * config.tokens)),
        "norm": jnp.ones((2, width)),
        "head": jnp.zeros((width, config.vocabulary)),
    }


def loss_of(params: Any, batch: Any, config: Config) -> jax.Array:
    """Mean cross entropy of the next target token."""
    embed = params["embed"].astype(config.dtype)

    def bias(near, tokens):
        distance = jnp.arange(tokens)[:, None] - jnp.arange(tokens)[None, :] + config.tokens
        return jnp.take(near, distance, axis=1).astype(config.dtype)

    past = jnp.where(jnp.tril(jnp.ones((config.targets, config.targets), bool)), 0.0, -1e9).astype(config.dtype)
    of_source, of_target = bias(params["near"][0], config.tokens), bias(params["near"][1], config.targets) + past

    def encoder(x, layer):
        x = x + attend(layer["own"], x, x, of_source, config.heads)
        return x + dense(layer["dense"], x), None

    def decoder(x, layer):
        x = x + attend(layer["own"], x, x, of_target, config.heads)
        x = x + attend(layer["other"], x, source, None, config.heads)
        return x + dense(layer["dense"], x), None

    cast = jax.tree.map(lambda w: w.astype(config.dtype), params)
    source, _ = jax.lax.scan(encoder, embed[batch["source"]], cast["encoder"])
    source = normalize(cast["norm"][0], source)
    x, _ = jax.lax.scan(decoder, embed[batch["target"]], cast["decoder"])
    logits = (normalize(cast["norm"][1], x) @ cast["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["target"][:, 1:]).mean()


def normalize(scale: Any, x: jax.Array) -> jax.Array:
    """Root-mean-square norm."""
    square = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return x * jax.lax.rsqrt(square + 1e-6).astype(x.dtype) * scale


def attend(layer: Any, x: jax.Array, y: jax.Array, bias: Any, heads: int) -> jax.Array:
    """Attention of `x` to `y`; to itself, if they are one."""
    normal = normalize(layer["norm"], x)
    read = normal if y is x else y
    query, key, value = (
        (of @ layer[name]).reshape(*of.shape[:2], heads, -1) for of, name in ((normal, "q"), (read, "k"), (read, "v"))
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    weights = jax.nn.softmax(scores if bias is None else scores + bias)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(x.shape) @ layer["o"]


def dense(layer: Any, x: jax.Array) -> jax.Array:
    """The two products of a block."""
    return jax.nn.relu(normalize(layer["norm"], x) @ layer["up"]) @ layer["down"]
