"""Reshard steps and reductions as `jax.lax` collectives, inside a fully manual `shard_map`.

In:     a local array and the steps the planner chose (`cost/reshard.py`).
Out:    the local array in its new sharding. One step emits exactly one collective, or none (`Slice`, `Mask`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import assert_never

import jax
import jax.numpy as jnp
from jax import lax

from autopar.cost.reshard import AllGather, AllReduce, AllToAll, Mask, ReduceScatter, Slice, Step


def apply_step(array: jax.Array, step: Step, axis_sizes: Mapping[str, int]) -> jax.Array:
    """Carry out one reshard step on this device's part of an array."""
    match step:
        case AllReduce(axes):
            return lax.psum(array, axes)
        case ReduceScatter(axes, dim):
            return lax.psum_scatter(array, axes, scatter_dimension=dim, tiled=True)
        case AllGather(axes, dim):
            return lax.all_gather(array, axes, axis=dim, tiled=True)
        case AllToAll(axes, source_dim, target_dim):
            return lax.all_to_all(array, axes, split_axis=target_dim, concat_axis=source_dim, tiled=True)
        case Slice(axes, dim):
            size = array.shape[dim] // math.prod(axis_sizes[axis] for axis in axes)
            return lax.dynamic_slice_in_dim(array, lax.axis_index(axes) * size, size, dim)
        case Mask(axes):
            return jnp.where(lax.axis_index(axes) == 0, array, jnp.zeros_like(array))
        case _:
            assert_never(step)


def reduce_at_once(arrays: Sequence[jax.Array], kind: str, axes: tuple[str, ...]) -> list[jax.Array]:
    """All-reduce results of a reduction other than a sum over `axes`; booleans travel as int8."""
    return [_REDUCTIONS[kind](array, axes) for array in arrays]


def _all_of(array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.pmin(array.astype(jnp.int8), axes).astype(bool) if array.dtype == bool else lax.pmin(array, axes)


def _any_of(array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return lax.pmax(array.astype(jnp.int8), axes).astype(bool) if array.dtype == bool else lax.pmax(array, axes)


_REDUCTIONS = {"max": _any_of, "min": _all_of}
