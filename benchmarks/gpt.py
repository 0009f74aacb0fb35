"""The GPT of the benchmarks: plain pytrees, AdamW, layers unrolled or scanned, optionally with experts in every second layer.

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
from parts import apply, dense_params, make_train_step, norm_params, normalize, state_types


@dataclass(frozen=True)
class Config:
    """Sizes; the defaults are GPT-2 small's, but for the number of layers."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50304
    tokens: int = 1024
    batch: int = 64
    scanned: bool = False
    remat: bool = False
    experts: int = 0
    dtype: Any = jnp.float32


def make_step(config: Config) -> tuple[Callable[..., Any], Any, Any]:
    """The step, and the types of its state and batch."""
    if config.scanned and config.experts:
        raise ValueError("experts are in every second layer, so layers are not alike, and cannot be scanned")
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, weight_decay=0.1))
    train_step = make_train_step(partial(loss_of, config=config), optimizer)
    state = state_types(jax.eval_shape(partial(init_params, config)), optimizer)
    return train_step, state, jax.ShapeDtypeStruct((config.batch, config.tokens), jnp.int32)


def init_params(config: Config) -> Any:
    """Parameters; layers in a list, or stacked where they are scanned."""
    width, lead = config.width, (config.layers,) if config.scanned else ()

    def layer(number=0):
        mixed = config.experts and number % 2
        return {
            "norm1": norm_params(width, lead),
            "qkv": dense_params(width, 3 * width, lead),
            "out": dense_params(width, width, lead),
            "norm2": norm_params(width, lead),
            **(experts() if mixed else dense()),
        }

    def dense():
        return {"up": dense_params(width, 4 * width, lead), "down": dense_params(4 * width, width, lead)}

    def experts():
        count = config.experts
        return {
            "router": jnp.zeros((width, count)),
            "up": jnp.zeros((count, width, 4 * width)),
            "down": jnp.zeros((count, 4 * width, width)),
        }

    return {
        "embed": jnp.zeros((config.vocabulary, width)),
        "positions": jnp.zeros((config.tokens, width)),
        "layers": layer() if config.scanned else [layer(number) for number in range(config.layers)],
        "norm": norm_params(width),
        "head": jnp.zeros((width, config.vocabulary)),
    }


def loss_of(params: Any, tokens: jax.Array, config: Config) -> jax.Array:
    """Mean cross entropy of the next token."""
    x = (params["embed"][tokens] + params["positions"]).astype(config.dtype)

    def block(x, layer):
        x = x + attention(layer, normalize(layer["norm1"], x), config.heads)
        if "router" in layer:
            return x + mixture(layer, normalize(layer["norm2"], x))
        return x + apply(layer["down"], jax.nn.gelu(apply(layer["up"], normalize(layer["norm2"], x))))

    block = jax.checkpoint(block) if config.remat else block
    if config.scanned:
        x, _ = jax.lax.scan(lambda x, layer: (block(x, layer), None), x, params["layers"])
    else:
        for layer in params["layers"]:
            x = block(x, layer)
    logits = (normalize(params["norm"], x) @ params["head"].astype(x.dtype)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def attention(layer: Any, x: jax.Array, heads: int) -> jax.Array:
    """Causal self-attention."""
    batch, tokens, width = x.shape
    q, k, v = jnp.split(apply(layer["qkv"], x).reshape(batch, tokens, heads, 3 * width // heads), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // heads) ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return apply(layer["out"], mixed.reshape(batch, tokens, width))


def mixture(layer: Any, x: jax.Array) -> jax.Array:
    """Experts, the best two of each token, as many tokens of a sequence as are their share; GShard (ICLR 2021), sec. 2.2."""
    tokens, count = x.shape[1], layer["router"].shape[-1]
    room = 2 * tokens // count
    gates = jax.nn.softmax((x @ layer["router"].astype(x.dtype)).astype(jnp.float32))
    dispatch = combine = jnp.zeros((*gates.shape, room), x.dtype)
    left, taken = gates, jnp.zeros((x.shape[0], 1, count), jnp.int32)
    for _ in range(2):
        chosen = jax.nn.one_hot(left.argmax(-1), count, dtype=jnp.int32)
        place = (jnp.cumsum(chosen, axis=1) - 1 + taken) * chosen
        seats = jax.nn.one_hot(place, room, dtype=x.dtype) * chosen[..., None]
        dispatch, combine = dispatch + seats, combine + seats * gates[..., None].astype(x.dtype)
        left, taken = left * (1 - chosen), taken + chosen.sum(1, keepdims=True)
    inside = jnp.einsum("btec,btd->becd", dispatch, x)
    inside = jax.nn.gelu(jnp.einsum("becd,edf->becf", inside, layer["up"].astype(x.dtype)))
    outside = jnp.einsum("becf,efd->becd", inside, layer["down"].astype(x.dtype))
    return jnp.einsum("btec,becd->btd", combine, outside)
