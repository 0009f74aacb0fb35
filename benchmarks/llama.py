"""The Llama of the benchmarks: grouped-query attention, rotary positions, gated MLP, AdamW; scanned or unrolled.

In:     `Llama`, sizes; `LLAMA_8B`, `LLAMA_70B`, `LLAMA_405B` are Meta's ("The Llama 3 herd of models", 2024, table 3).
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
from parts import make_train_step, state_types


@dataclass(frozen=True)
class Llama:
    """Sizes; parameters are float32, computed with in `dtype`."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int = 8
    vocabulary: int = 128256
    tokens: int = 4096
    batch: int = 64
    scanned: bool = True
    remat: bool = True
    dtype: Any = jnp.bfloat16

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads


LLAMA_8B = Llama(layers=32, width=4096, hidden=14336, heads=32)
LLAMA_70B = Llama(layers=80, width=8192, hidden=28672, heads=64)
LLAMA_405B = Llama(layers=126, width=16384, hidden=53248, heads=128)


def make_step(config: Llama) -> tuple[Callable[..., Any], Any, Any]:
    """The step, and the types of its state and batch."""
    optimizer = optax.adamw(3e-4, weight_decay=0.1)
    train_step = make_train_step(partial(loss_of, config=config), optimizer)
    state = state_types(jax.eval_shape(partial(init_params, config)), optimizer)
    return train_step, state, jax.ShapeDtypeStruct((config.batch, config.tokens), jnp.int32)


def init_params(config: Llama, key: jax.Array | None = None) -> Any:
    """Parameters; layers in a list, or stacked where they are scanned. Zeros without a key."""
    width, kv = config.width, config.kv_heads * config.head_width
    shapes = {
        "norm1": (width,),
        "q": (width, width),
        "k": (width, kv),
        "v": (width, kv),
        "o": (width, width),
        "norm2": (width,),
        "gate": (width, config.hidden),
        "up": (width, config.hidden),
        "down": (config.hidden, width),
    }
    count = 0

    def array(*shape):
        nonlocal count
        count += 1
        if len(shape) == 1:
            return jnp.ones(shape)
        if key is None:
            return jnp.zeros(shape)
        return jax.random.normal(jax.random.fold_in(key, count), shape) / shape[-2] ** 0.5

    def layer(lead=()):
        return {name: jnp.ones((*lead, *s)) if len(s) == 1 else array(*lead, *s) for name, s in shapes.items()}

    return {
        "embed": array(config.vocabulary, width),
        "layers": layer((config.layers,)) if config.scanned else [layer() for _ in range(config.layers)],
        "norm": jnp.ones((width,)),
        "head": array(width, config.vocabulary),
    }


def loss_of(
    params: Any, tokens: jax.Array, config: Llama, gather: Callable[[Any], Any] = lambda tree: tree
) -> jax.Array:
    """Mean cross entropy of the next token; `gather` brings together what is needed of the parameters next."""
    x = gather(params["embed"]).astype(config.dtype)[tokens]

    def block(x, layer):
        layer = gather(layer)
        layer = jax.tree.map(lambda w: w.astype(config.dtype), layer)
        x = x + attention(layer, normalize(layer["norm1"], x), config)
        h = normalize(layer["norm2"], x)
        return x + (jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]

    block = jax.checkpoint(block) if config.remat else block
    if config.scanned:
        x, _ = jax.lax.scan(lambda x, layer: (block(x, layer), None), x, params["layers"])
    else:
        for layer in params["layers"]:
            x = block(x, layer)
    norm, head = gather((params["norm"], params["head"]))
    logits = (normalize(norm.astype(x.dtype), x) @ head.astype(x.dtype)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def normalize(scale: jax.Array, x: jax.Array) -> jax.Array:
    """Root-mean-square norm."""
    square = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return (x * jax.lax.rsqrt(square + 1e-5).astype(x.dtype)) * scale


def attention(layer: Any, x: jax.Array, config: Llama) -> jax.Array:
    """Causal self-attention; several heads share one key and value."""
    batch, tokens, width = x.shape
    groups = config.heads // config.kv_heads
    q = rotated((x @ layer["q"]).reshape(batch, tokens, config.kv_heads, groups, config.head_width))
    k = rotated((x @ layer["k"]).reshape(batch, tokens, config.kv_heads, config.head_width))
    v = (x @ layer["v"]).reshape(batch, tokens, config.kv_heads, config.head_width)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k) / config.head_width**0.5
    scores = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), scores, jnp.asarray(-1e9, scores.dtype))
    mixed = jnp.einsum("bhgqk,bkhd->bqhgd", jax.nn.softmax(scores), v)
    return mixed.reshape(batch, tokens, width) @ layer["o"]


def rotated(x: jax.Array) -> jax.Array:
    """Rotary positions: pairs of elements of a head are turned by an angle that grows with the position."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 500000.0 ** (-jnp.arange(half) / half)
    angles = angles.reshape(x.shape[1], *(1,) * (x.ndim - 3), half)
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)
