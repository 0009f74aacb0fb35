"""Shared by gather and scatter: their factors, and the conversion of global indices to a device's local ones.

In:     the dimension numbers of a `gather`, or the mirrored ones of a `scatter`; index arrays as in the user's program: of
        any integer type, possibly out of range or negative.
Out:    `IndexTerms`, the operation in factors; and, on a device that holds one shard of an indexed dim, local indices and
        which of them fall into this shard.
Method: JAX's modes are about global indices, so an index is clamped, or found out of range, before the shard's offset is
        subtracted. An index that is out of range belongs to the first device, so that exactly one device answers it. The
        start of a slice is always clamped here: XLA merges a slice of a slice into one without clamping either (jaxlib 0.10),
        and splitting an operation adds slices before and after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from autopar.ir.rules.rule import Dim, Factor, Shard, Term, factor_names
from autopar.ir.rules.terms import new_term


@dataclass(frozen=True, slots=True)
class IndexTerms:
    """The factors of reading slices from a table, or of writing them into it.

    Attributes:
        table: Term of the table. A dim that is taken whole shares its factor with the slices, a batching dim with slices and
            indices.
        indices: Term of the indices; the last dim is the vector of coordinates.
        slices: Term of the slices: `gather`'s result, `scatter`'s updates.
        sizes: Global length of each factor.
        searched: Table dims that an index picks single elements from -> their factors, which occur in no other term.
        positions: Factors of the indices' dims that are not batching dims; they occur in indices and slices only.
        whole: Factors that may not be split: dims of which several elements are taken, but not all.
    """

    table: Term
    indices: Term
    slices: Term
    sizes: Mapping[Factor, int]
    searched: Mapping[int, Factor]
    positions: tuple[Factor, ...]
    whole: tuple[Factor, ...]


def index_terms(
    table: Sequence[int], indices: Sequence[int], taken: Sequence[int], numbers: lax.GatherDimensionNumbers
) -> IndexTerms:
    """The factors of a gather, or of a scatter with mirrored numbers.

    Args:
        table: Shape of the array that is read from, or written into.
        indices: Shape of the indices; the last dim is the vector of coordinates.
        taken: Length of a slice along each dim of the table.
    """
    fresh = factor_names()
    sizes: dict[Factor, int] = {}
    whole: list[Factor] = []

    def new(size: int) -> Dim:
        dim = () if size == 1 else (next(fresh),)
        sizes.update(dict.fromkeys(dim, size))
        return dim

    at = [new(size) for size in indices[:-1]]
    batch_of = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    searched: dict[int, Factor] = {}
    rows: list[Dim] = []
    windows: list[Dim] = []
    for d, (size, length) in enumerate(zip(table, taken, strict=True)):
        if d in batch_of:
            rows.append(at[batch_of[d]])
            continue
        row = window = new(size)
        if length != size:
            window = () if length == 1 else new(length)
            if length == 1 and d in numbers.start_index_map:
                searched[d] = row[0]
            else:
                whole += [*row, *window]
        rows.append(row)
        if d not in numbers.collapsed_slice_dims:
            windows.append(window)
    of_window, of_position = iter(windows), iter(at)
    ndim = len(windows) + len(at)
    slices = tuple(next(of_window if d in numbers.offset_dims else of_position) for d in range(ndim))
    vector = new(indices[-1])
    positions = [factor for d, dim in enumerate(at) if d not in batch_of.values() for factor in dim]
    return IndexTerms(
        tuple(rows), (*at, vector), slices, sizes, searched, tuple(positions), tuple(whole) + tuple(vector)
    )


def slice_terms(
    table: Sequence[int], taken: Sequence[int]
) -> tuple[Term, Term, tuple[Factor, ...], tuple[Factor, ...]]:
    """Terms of a table and of one slice of it; factors of which the slice has a single element; factors not to be split."""
    fresh = factor_names()
    rows = new_term(table, fresh)
    lengths = list(zip(rows, table, taken, strict=True))
    slices = [dim if length == size else new_term([length], fresh)[0] for dim, size, length in lengths]
    single = [factor for dim, size, length in lengths if length == 1 != size for factor in dim]
    cut = [(*dim, *own) for (dim, size, length), own in zip(lengths, slices, strict=True) if 1 != length != size]
    return rows, tuple(slices), tuple(single), tuple(factor for factors in cut for factor in factors)


def signed(index: jax.Array) -> jax.Array:
    """The indices in a signed dtype of at least 32 bits; larger ones are clamped to its maximum."""
    if jnp.issubdtype(index.dtype, jnp.signedinteger):
        return index.astype(jnp.promote_types(index.dtype, jnp.int32))
    if index.dtype.itemsize >= 4:
        index = jnp.minimum(index, jnp.array(jnp.iinfo(jnp.int32).max, index.dtype))
    return index.astype(jnp.int32)


def locate(index: jax.Array, factor: Factor, shard: Shard) -> tuple[jax.Array, jax.Array]:
    """Local index, and whether this device answers it.

    `index`: global, signed; may be out of range.

    Returns:
        The local index (-1 where the global one is out of range), and a mask of the same shape, which is true on exactly
        one of the devices along the dim.
    """
    inside = (index >= 0) & (index < shard.sizes[factor])
    local = jnp.where(inside, index, 0) - jnp.asarray(shard.offset(factor), index.dtype)
    mine = (local >= 0) & (local < shard.local_size(factor))
    first = jnp.asarray(shard.index(factor)) == 0
    return jnp.where(inside, local, -1), jnp.where(inside, mine, first)


def locate_slice(
    starts: Sequence[jax.Array], taken: Sequence[int], shape: Sequence[int], table: Term, shard: Shard
) -> tuple[list[jax.Array], jax.Array]:
    """Local start of the slice that begins at global `starts`, and whether this device holds it.

    Args:
        starts: A scalar for each dim; clamped, so that the slice is inside.
        taken: Length of the slice along each dim.
        shape: Global shape of the table.
    """
    begin, mine = [], jnp.asarray(True)
    for start, length, size, dim in zip(starts, taken, shape, table, strict=True):
        place = jnp.clip(signed(start), 0, size - length)
        if length != size and shard.local_dim(dim) != size:
            place, here = locate(place, dim[0], shard)
            place, mine = jnp.where(here, place, 0), mine & here
        begin.append(place.astype(jnp.int32))
    return begin, mine
