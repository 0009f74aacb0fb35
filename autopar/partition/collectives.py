"""Carries out reshard steps and reductions as `jax.lax` collectives, inside a fully manual `shard_map`.

In:     a local array and the steps that the planner chose (`cost/reshard.py`).
Out:    the local array in its new sharding. One step emits exactly one collective, or none (`Slice`, `Mask`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, assert_never

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from autopar.cost.steps import AllGather, AllReduce, AllToAll, Mask, Permute, ReduceScatter, Slice, Step
from autopar.ir.dims import apart, together
from autopar.ir.split.placement import Reduction
from autopar.partition.owned import without_loss


def apply_step(array: jax.Array, step: Step, axis_sizes: Mapping[str, int]) -> jax.Array:
    """Carry out one reshard step on this device's shard of an array."""
    match step:
        case AllReduce(axes):
            return lax.psum(array, axes)
        case ReduceScatter(axes, dim):
            return lax.psum_scatter(array, axes, scatter_dimension=dim, tiled=True)
        case AllGather(axes, dim):
            return lax.all_gather(array, axes, axis=dim, tiled=True)
        case AllToAll(axes, source_dim, target_dim):
            # XLA for CPUs sends pieces, and where the array is put together from these it gives each a layout of its own, which
            # its verifier then refuses: `concatenate([x, y.T])` along the dim that is sent.
            array = lax.optimization_barrier(array)
            return lax.all_to_all(array, axes, split_axis=target_dim, concat_axis=source_dim, tiled=True)
        case Permute(source_axis=source_axis, axes=axes):
            # Device (i, j) has shard i and wants shard j, which (j, i) has: the same in either order of the axes.
            size = axis_sizes[source_axis]
            pairs = [(i * size + j, j * size + i) for i in range(size) for j in range(size)]
            return lax.ppermute(array, axes, pairs)
        case Slice(axes, dim):
            size = array.shape[dim] // math.prod(axis_sizes[axis] for axis in axes)
            keep = lax.optimization_barrier if _is_list_of_integers(array) else lambda x: x
            return keep(lax.dynamic_slice_in_dim(keep(array), lax.axis_index(axes) * size, size, dim))
        case Mask(axes):
            return jnp.where(lax.axis_index(axes) == 0, array, jnp.zeros_like(array))
        case _:
            assert_never(step)


def with_rows_major(array: jax.Array) -> jax.Array:
    """Pin an array to its row-major layout, on GPUs, where XLA would choose one that needs a copy of something larger.

    The operand of a gather along an inner dim: XLA wants the gathered dim to be the major one, and where a loop gathers the
    rows of a stack it would transpose the whole stack before the loop, and keep both; this way each row is transposed in its
    own trip. An input of elementwise work that waits: XLA would transpose it, and do all of that work in the layout of the
    product that reads the result. A row of a stack: XLA would read or write all rows as products have them, and transpose
    the whole stack before the loop, between two loops, or after them.
    """
    return with_layout_constraint(array, Layout(tuple(range(array.ndim)))) if array.ndim > 1 else array


def is_along_rows(step: Step) -> bool:
    """Whether a step gathers or scatters a dim other than the first.

    XLA for CPUs copies such rows one by one, which takes five times as long as `apply_fused`, whose pieces are contiguous
    and are transposed in one pass.
    """
    return isinstance(step, AllGather | ReduceScatter) and step.dim > 0


def _is_list_of_integers(array: jax.Array) -> bool:
    """Whether a slice needs barriers: XLA's simplifier (jaxlib 0.10) mistakes one element of it, times a number, for an
    element of the slice."""
    is_wide = jnp.issubdtype(array.dtype, jnp.integer) and array.dtype.itemsize >= 4
    return bool(is_wide) and max(array.shape, default=1) == array.size


def reduce_at_once(arrays: Sequence[jax.Array], kind: Reduction, axes: tuple[str, ...]) -> list[jax.Array]:
    """All-reduce results that may not stay partial, over `axes`.

    Booleans are sent as int8, floats under "max" and "min" as integers; 16-bit ones as int32 (`reduced_itemsize`).
    """
    return [_REDUCTIONS[kind](array, axes) for array in arrays]


def _extreme(array: jax.Array, axes: tuple[str, ...], *, largest: bool) -> jax.Array:
    """The maximum or minimum over devices; NaN if any is NaN, which backends may lose (XLA:CPU and NCCL do).

    Floats are sent as integers of their width and order: their bits, with all but the sign flipped for negative numbers.
    NaN becomes the last or the first integer, which maps back to NaN.
    """
    reduce: Callable[..., jax.Array] = (
        partial(lax.pmax, axis_name=axes) if largest else partial(lax.pmin, axis_name=axes)
    )
    if array.dtype == bool:
        return reduce(array.astype(jnp.int8)).astype(bool)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return _in_32_bits(array, reduce)
    width = jnp.dtype(f"int{8 * array.dtype.itemsize}")
    limits = jnp.iinfo(width)
    ordered = _flipped(lax.bitcast_convert_type(array, width))
    ordered = jnp.where(jnp.isnan(array), jnp.asarray(limits.max if largest else limits.min, width), ordered)
    return lax.bitcast_convert_type(_flipped(_in_32_bits(ordered, reduce)), array.dtype)


def _in_32_bits(array: jax.Array, reduce: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Reduce integers, widening 16-bit ones meanwhile, as backends would."""
    if array.dtype not in (jnp.int16, jnp.uint16):
        return reduce(array)
    return reduce(array.astype(jnp.dtype(f"{array.dtype.kind}4"))).astype(array.dtype)


def _flipped(bits: jax.Array) -> jax.Array:
    """Flip all bits but the sign of negative integers; its own inverse."""
    return jnp.where(bits < 0, bits ^ jnp.asarray(jnp.iinfo(bits.dtype).max, bits.dtype), bits)


def _sum_of(array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The value of the one device that has it, where the others have zeros."""
    if array.dtype == bool:
        return lax.psum(array.astype(jnp.int8), axes).astype(bool)
    add = partial(lax.psum, axis_name=axes)
    return without_loss([array], [AllReduce(axes)], {}, lambda parts: [_in_32_bits(parts[0], add)])[0]


_REDUCTIONS: dict[Reduction, Callable[..., jax.Array]] = {
    "max": partial(_extreme, largest=True),
    "min": partial(_extreme, largest=False),
    "sum": _sum_of,
}


def apply_fused(arrays: Sequence[jax.Array], steps: Sequence[Any], axis_sizes: Mapping[str, int]) -> list[jax.Array]:
    """Carry out steps of one kind over the same axes on arrays of one dtype with a single collective."""
    first = steps[0]
    axes = first.axes
    num_shards = math.prod(axis_sizes[axis] for axis in axes)
    match first:
        case AllReduce():
            pieces = _unpack(lax.psum(_pack([a.reshape(-1) for a in arrays]), axes), [a.size for a in arrays])
            return [piece.reshape(a.shape) for piece, a in zip(pieces, arrays, strict=True)]
        case AllGather():
            gathered = lax.all_gather(_pack([a.reshape(-1) for a in arrays]), axes, axis=0, tiled=False)
            pieces = _unpack(gathered.reshape(num_shards, -1), [a.size for a in arrays])
            return [
                together(jnp.moveaxis(piece.reshape(num_shards, *a.shape), 0, step.dim), step.dim)
                for piece, a, step in zip(pieces, arrays, steps, strict=True)
            ]
        case ReduceScatter():
            parted = [
                jnp.moveaxis(apart(a, step.dim, num_shards), step.dim, 0) for a, step in zip(arrays, steps, strict=True)
            ]
            packed = _pack([a.reshape(num_shards, -1) for a in parted])
            scattered = lax.psum_scatter(packed, axes, scatter_dimension=0, tiled=True)[0]
            pieces = _unpack(scattered, [a.size // num_shards for a in parted])
            return [piece.reshape(a.shape[1:]) for piece, a in zip(pieces, parted, strict=True)]
        case _:
            raise AssertionError(f"{first} is never fused with other steps")


def _pack(arrays: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate(arrays, axis=-1)


def _unpack(packed: jax.Array, lengths: Sequence[int]) -> list[jax.Array]:
    ends = [sum(lengths[: k + 1]) for k in range(len(lengths))]
    return [packed[..., end - length : end] for end, length in zip(ends, lengths, strict=True)]
