"""Splits a dim of an array into equal blocks, and joins two dims into one; puts equal blocks behind each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

Dims = frozenset[int]
"""Some dims of one array."""


def apart(x: jax.Array, dim: int, count: int) -> jax.Array:
    """Split a dim in two: `count` equal blocks, and the elements of each."""
    return jnp.reshape(x, (*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :]))


def together(x: jax.Array, dim: int) -> jax.Array:
    """Join a dim and the next into one."""
    return jnp.reshape(x, (*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :]))


def pieces_dim(whole: Sequence[int], pieces: Sequence[int]) -> int:
    """The dim of an array that `in_pieces` splits, given its shape and the shape of its pieces."""
    return next((d for d, (size, part) in enumerate(zip(whole, pieces[1:], strict=True)) if size != part), 0)


def in_pieces(x: Any, shape: Sequence[int]) -> Any:
    """The equal parts of an array of NumPy or JAX along a dim, one behind the other: of `shape`, parts first."""
    dim = pieces_dim(x.shape, shape)
    parted = x.reshape(*x.shape[:dim], shape[0], *shape[dim + 1 :])
    return parted.transpose(dim, *(d for d in range(parted.ndim) if d != dim)) if dim else parted
