"""The steps of a reshard: one collective each, or none.

In:     (types only.)
Out:    `Step`, a closed union; what a step does to a sharding, and which collective it is.
Method: a dim's axes are major to minor and ascending in mesh order, so a gather takes the last axes of a dim away, and a
        slice, a reduce-scatter or an all-to-all appends axes behind those that are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never, get_args

import numpy as np

from autopar.mesh import LogicalMesh, Sharding

CollectiveKind = Literal[
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all"
]
"""A collective as HLO spells it."""
COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Add up partial sums."""

    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AllGather:
    """Bring the parts of `dim` together."""

    axes: tuple[str, ...]
    dim: int


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Add up partial sums, each device one part of `dim`."""

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
    """Split `dim` over `target_axis` instead of `source_axis`, of the same size: every device sends its part to one."""

    source_axis: str
    target_axis: str
    dim: int
    axes: tuple[str, ...]
    """Both, in mesh order."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Keep one part of a dim that is whole on every device."""

    axes: tuple[str, ...]
    dim: int


@dataclass(frozen=True, slots=True)
class Mask:
    """Turn a whole value into a partial sum: the first device keeps it, the others hold zeros."""

    axes: tuple[str, ...]


Step = AllReduce | AllGather | ReduceScatter | AllToAll | Permute | Slice | Mask


def reduced_itemsize(kind: str, dtype: np.dtype) -> int:
    """Bytes of an element while a reduction of this kind travels: `"max"`, `"min"`, `"sum"` of what one device has.

    Truth values take one. Integers of 16 bits, as which the largest and smallest of such floats travel, take four: GPUs'
    libraries do not know them, and XLA widens them (`AllReducePromotion`).
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
    """The collective a step is; None where it does not communicate."""
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
