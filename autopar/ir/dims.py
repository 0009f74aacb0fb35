"""Splits a dim of an array into equal blocks, and joins two dims into one."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def apart(x: jax.Array, dim: int, count: int) -> jax.Array:
    """Split a dim in two: `count` equal blocks, and the elements of each."""
    return jnp.reshape(x, (*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :]))


def together(x: jax.Array, dim: int) -> jax.Array:
    """Join a dim and the next into one."""
    return jnp.reshape(x, (*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :]))
