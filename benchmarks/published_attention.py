"""Attention without its projections, for the layers of published models.

In:     queries, keys and values by heads, [samples, tokens, heads, size].
Out:    the attention output, in one kernel (`flash`) or through memory (`plain`); rotary positions (`rotate`).
Method: the kernel has a sharding rule and states its FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import autopar


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions."""
    angles = jnp.arange(x.shape[1])[:, None] * 1e4 ** (-jnp.arange(x.shape[-1] // 2) / (x.shape[-1] // 2))
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    sine, cosine = jnp.sin(angles)[None, :, None], jnp.cos(angles)[None, :, None]
    return jnp.concatenate([a * cosine - b * sine, a * sine + b * cosine], -1).astype(x.dtype)


def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention whose scores go through memory."""
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(t, groups, 2) if groups > 1 else t for t in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    seen = jnp.tril(jnp.ones((q.shape[1], k.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e4).astype(jnp.float32)).astype(q.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def _pair_flops(products: int) -> Callable[..., float]:
    """So many products over all pairs of tokens that see each other."""

    def flops(q: Any, k: Any, *rest: Any) -> float:
        samples, tokens, heads, size = q.shape
        return products * samples * heads * tokens * rest[-1].shape[0] * k.shape[1] * size

    return flops


def flash(q: jax.Array, k: jax.Array, v: jax.Array, parts: int, causal: bool) -> jax.Array:
    """Attention in one kernel, keys and values of as many parts of the sequence going round as there are.

    Half of what is causal is masked and left out.
    """
    return _flash(q, k, v, jnp.zeros(parts * (1 if causal else 2), q.dtype))


@jax.custom_vjp
def _flash(q: jax.Array, k: jax.Array, v: jax.Array, parts: jax.Array) -> jax.Array:
    """Its backward pass computes the scores again (Dao, "FlashAttention-2", 2023)."""
    return _flash_forward(q, k, v, parts)


@autopar.sharding_rule("b s (g r) d, b t g d, b t g d, c -> b s (g r) d", flops=_pair_flops(2))
def _flash_forward(q: jax.Array, k: jax.Array, v: jax.Array, parts: jax.Array) -> jax.Array:
    return q + (k.sum() + v.sum() + parts.sum()).astype(q.dtype)


@autopar.sharding_rule(
    "b s (g r) d, b t g d, b t g d, b s (g r) d, b s (g r) d, c -> b s (g r) d, b t g d, b t g d",
    flops=_pair_flops(5),
)
def _flash_backward(q: Any, k: Any, v: Any, y: Any, dy: Any, parts: Any) -> Any:
    return q + (y + dy) + parts.sum().astype(q.dtype), k + v, v


def _flash_saved(q: jax.Array, k: jax.Array, v: jax.Array, parts: jax.Array) -> Any:
    y = _flash_forward(q, k, v, parts)
    return y, (q, k, v, y, parts)


def _flash_gradients(saved: Any, dy: jax.Array) -> Any:
    *kept, parts = saved
    return *_flash_backward(*kept, dy, parts), jnp.zeros_like(parts)


_flash.defvjp(_flash_saved, _flash_gradients)
