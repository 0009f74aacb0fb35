"""A dim of an array in equal blocks: as two dims, and as one again."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def apart(x: jax.Array, dim: int, count: int) -> jax.Array:
    """A dim as two: so many equal blocks, and what is in each."""
    return jnp.reshape(x, (*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :]))


def together(x: jax.Array, dim: int) -> jax.Array:
    """A dim and the one behind it as one."""
    return jnp.reshape(x, (*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :]))
