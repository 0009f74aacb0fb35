"""The steps of a reshard: one collective each, or none.

In:     (types only.)
Out:    `Step`, a closed union; the effect of a step on a sharding, and the collective that it is.
Method: a dim's axes are ordered from major to minor, ascending in mesh order, so that a gather removes the last axes of a
        dim, and a slice, a reduce-scatter or an all-to-all appends axes after the present ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never, get_args

import numpy as np

from autopar.ir.split.placement import Reduction
from autopar.mesh import LogicalMesh, Sharding

CollectiveKind = Literal[
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all"
]
"""Kinds of collectives, as HLO spells them."""
COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Reduce partial sums to every device."""

    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AllGather:
    """Gather the shards of `dim`."""

    axes: tuple[str, ...]
    dim: int


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Reduce partial sums, split along `dim`."""

    axes: tuple[str, ...]
    dim: int


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Split `target_dim` instead of `source_dim`."""

    axes: tuple[str, ...]
    source_dim: int
    target_dim: int


@dataclass(frozen=True, slots=True)
class Permute:
    """Split `dim` over `target_axis` instead of `source_axis`, of the same size: each device sends its shard to one other."""

    source_axis: str
    target_axis: str
    dim: int
    axes: tuple[str, ...]
    """Both axes, in mesh order."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Keep one shard of `dim`, without communication."""

    axes: tuple[str, ...]
    dim: int


@dataclass(frozen=True, slots=True)
class Mask:
    """Turn a replicated value into a partial sum: the first device keeps it, the others hold zeros."""

    axes: tuple[str, ...]


Step = AllReduce | AllGather | ReduceScatter | AllToAll | Permute | Slice | Mask


def reduced_itemsize(kind: Reduction, dtype: np.dtype) -> int:
    """Bytes of an element as sent in an immediate reduction: `"max"`, `"min"`, or `"sum"` of one device's value and zeros.

    Booleans take one byte. 16-bit integers, as which 16-bit floats are sent under "max" and "min", take four: libraries for
    GPUs do not support them, and XLA widens them (`AllReducePromotion`).
    """
    as_integers = kind != "sum" or np.issubdtype(dtype, np.integer)
    return 4 if dtype.itemsize == 2 and as_integers else dtype.itemsize


def apply_to_sharding(step: Step, sharding: Sharding, mesh: LogicalMesh) -> Sharding:
    """The sharding of a value after one step."""
    dims, partial = list(sharding.dims), sharding.partial
    match step:
        case AllReduce(axes):
            partial = tuple(a for a in partial if a not in axes)
        case AllGather(axes, dim):
            dims[dim] = dims[dim][: -len(axes)]
        case ReduceScatter(axes, dim):
            partial = tuple(a for a in partial if a not in axes)
            dims[dim] += axes
        case AllToAll(axes, source, target):
            dims[source] = dims[source][: -len(axes)]
            dims[target] += axes
        case Permute(source_axis, target_axis, dim):
            dims[dim] = tuple(target_axis if a == source_axis else a for a in dims[dim])
        case Slice(axes, dim):
            dims[dim] += axes
        case Mask(axes):
            partial = tuple(a for a in mesh.axis_sizes if a in partial or a in axes)
        case _:
            assert_never(step)
    return Sharding(tuple(dims), partial)


def step_kind(step: Step) -> CollectiveKind | None:
    """The collective of a step; None: it does not communicate."""
    match step:
        case AllReduce():
            return "all-reduce"
        case AllGather():
            return "all-gather"
        case ReduceScatter():
            return "reduce-scatter"
        case AllToAll():
            return "all-to-all"
        case Permute():
            return "collective-permute"
        case Slice() | Mask():
            return None
        case _:
            assert_never(step)
