"""Finds the cheapest reshard of a tensor from one sharding to another.

In:     a tensor's shape and item size, two shardings, the logical mesh with its links.
Out:    `Reshard`: the steps (`steps.py`), one collective each or none, and their seconds.
Method: shortest paths (Dijkstra) over all shardings of the tensor, in which each mesh axis splits one dim, holds partial
        sums, or does neither; every single step is an edge. The graph depends only on which axes divide which dims, so that
        tensors of many shapes share it; lengths depend on the bytes. Rink et al., "Memory-efficient array redistribution
        through portable collective communication", 2021, prove optimal sequences of gathers, slices and exchanges; the
        search also covers partial sums and unequal links.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import dijkstra

from autopar.cost.collectives import collective_seconds
from autopar.cost.steps import (
    AllGather,
    AllReduce,
    AllToAll,
    CollectiveKind,
    Mask,
    Permute,
    ReduceScatter,
    Slice,
    Step,
    apply_to_sharding,
    step_kind,
)
from autopar.mesh import LogicalMesh, Sharding

_STEP_SECONDS = 1e-15
"""Added to the length of every edge, so that of equally cheap paths the one with the fewest steps is taken."""


@dataclass(frozen=True, slots=True)
class Reshard:
    """Steps of a reshard, in order, and their seconds together."""

    steps: tuple[Step, ...]
    seconds: float


def cheapest_reshard(
    shape: tuple[int, ...], itemsize: int, source: Sharding, target: Sharding, mesh: LogicalMesh
) -> Reshard:
    """The cheapest steps from `source` to `target`.

    Args:
        shape: Global shape of the tensor.
        itemsize: Bytes of one element.
        source: Present sharding.
        target: Sharding wanted.
        mesh: Logical mesh, whose links give the cost of collectives.

    Raises:
        ValueError: There is no path.
    """
    if source == target:
        return Reshard((), 0.0)
    table, dims = _table(shape, itemsize, mesh)
    at, end = table.layout.position(source, dims), table.layout.position(target, dims)
    if not np.isfinite(table.seconds[at, end]):
        raise ValueError(f"no reshard from {source} to {target} of a tensor {shape}")
    path: list[Step] = []
    while end != at:
        before = int(table.before[at, end])
        path.append(_on_dims(table.layout.steps[before, end], dims))
        end = before
    return Reshard(tuple(reversed(path)), float(table.seconds[at, table.layout.position(target, dims)]))


def reshard_seconds(
    shape: tuple[int, ...], itemsize: int, sources: Sequence[Sharding], targets: Sequence[Sharding], mesh: LogicalMesh
) -> np.ndarray:
    """Seconds of the cheapest reshard from each of `sources` to each of `targets`: float64 `[source, target]`."""
    table, dims = _table(shape, itemsize, mesh)
    rows = [table.layout.position(s, dims) for s in sources]
    columns = [table.layout.position(t, dims) for t in targets]
    return table.seconds[np.ix_(rows, columns)]


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """All shardings of tensors whose dims the same axes divide, and the steps between them.

    Attributes:
        index: Sharding (of splittable dims only) -> its position.
        steps: (from, to) -> step.
        sources: Per step, the position of its source.
        targets: Per step, the position of its target.
        group_of: Per step, its index in `groups`.
        groups: Classes of steps of equal cost: (kind, axes, number of shards that the array is in).
    """

    index: dict[Sharding, int]
    steps: dict[tuple[int, int], Step]
    sources: np.ndarray
    targets: np.ndarray
    group_of: np.ndarray
    groups: tuple[tuple[CollectiveKind | None, tuple[str, ...], int], ...]

    def position(self, sharding: Sharding, dims: tuple[int, ...]) -> int:
        """Position of a sharding of a tensor whose splittable dims are `dims`."""
        return self.index[_of_dims(sharding, dims)]


@functools.lru_cache(maxsize=1 << 16)
def _of_dims(sharding: Sharding, dims: tuple[int, ...]) -> Sharding:
    return Sharding(tuple([sharding.dims[d] for d in dims]), sharding.partial)


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """Shortest paths between all shardings of a tensor: seconds `[from, to]`, and the last sharding before `to`."""

    layout: _Layout
    seconds: np.ndarray
    before: np.ndarray


@functools.lru_cache(maxsize=4096)
def _table(shape: tuple[int, ...], itemsize: int, mesh: LogicalMesh) -> tuple[_Table, tuple[int, ...]]:
    """The table of a tensor, and its splittable dims, in the table's order."""
    sizes = tuple(mesh.axis_sizes.values())
    fits = [tuple(_fitting(length, sizes)) for length in shape]
    dims = tuple(sorted((d for d in range(len(shape)) if fits[d]), key=lambda d: (fits[d], d)))
    return _shared_table(tuple(fits[d] for d in dims), math.prod(shape) * itemsize, mesh), dims


@functools.lru_cache(maxsize=1024)
def _shared_table(fits: tuple[tuple[tuple[int, ...], ...], ...], num_bytes: int, mesh: LogicalMesh) -> _Table:
    layout = _layout(fits, LogicalMesh(mesh.shape, mesh.axis_names))
    seconds_of = [
        _STEP_SECONDS + (collective_seconds(kind, num_bytes // parts, axes, mesh) if kind else 0.0)
        for kind, axes, parts in layout.groups
    ]
    count = len(layout.index)
    lengths = np.array(seconds_of)[layout.group_of] if len(layout.group_of) else np.zeros(0)
    graph = csr_array((lengths, (layout.sources, layout.targets)), shape=(count, count))
    seconds, before = dijkstra(graph, return_predecessors=True)
    return _Table(layout, seconds, before)


def _fitting(length: int, sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Sets of axes that can split a dim of this length together."""
    wide = [k for k, size in enumerate(sizes) if size > 1]
    for count in range(1, len(wide) + 1):
        for axes in itertools.combinations(wide, count):
            if length and length % math.prod(sizes[k] for k in axes) == 0:
                yield axes


@functools.lru_cache(maxsize=256)
def _layout(fits: tuple[tuple[tuple[int, ...], ...], ...], mesh: LogicalMesh) -> _Layout:
    """Build the graph of shardings; the links of `mesh` do not matter."""
    names = tuple(mesh.axis_sizes)
    allowed = [{(), *(tuple(names[k] for k in axes) for axes in fitting)} for fitting in fits]
    index = {sharding: k for k, sharding in enumerate(_all_shardings(allowed, mesh))}
    steps: dict[tuple[int, int], Step] = {}
    groups: dict[tuple[CollectiveKind | None, tuple[str, ...], int], int] = {}
    group_of: dict[tuple[int, int], int] = {}
    for sharding, position in index.items():
        for step in _steps_from(sharding, mesh, allowed):
            following = apply_to_sharding(step, sharding, mesh)
            target = index[following]
            kind = step_kind(step)
            parts = (following if kind == "all-gather" else sharding).num_shards(mesh)
            group = groups.setdefault((kind, step.axes, parts), len(groups))
            steps[position, target] = step
            group_of[position, target] = group
    ends = np.array(list(steps), dtype=np.int64).reshape(-1, 2)
    return _Layout(
        index, steps, ends[:, 0], ends[:, 1], np.array(list(group_of.values()), dtype=np.int64), tuple(groups)
    )


def _all_shardings(allowed: Sequence[set[tuple[str, ...]]], mesh: LogicalMesh) -> Iterator[Sharding]:
    """All shardings: each axis splits one of the dims, holds partial sums, or does neither."""
    partial = len(allowed)
    options = [range(-1, partial + 1) if size > 1 else (-1,) for size in mesh.axis_sizes.values()]
    for choice in itertools.product(*options):
        dims = tuple(tuple(a for a, c in zip(mesh.axis_sizes, choice, strict=True) if c == d) for d in range(partial))
        if all(axes in fitting for axes, fitting in zip(dims, allowed, strict=True)):
            yield Sharding(dims, tuple(a for a, c in zip(mesh.axis_sizes, choice, strict=True) if c == partial))


def _steps_from(sharding: Sharding, mesh: LogicalMesh, allowed: Sequence[set[tuple[str, ...]]]) -> Iterator[Step]:
    """All single steps to other shardings in which every dim is split as `allowed`."""
    used = {axis for axes in sharding.dims for axis in axes} | set(sharding.partial)
    free = [axis for axis, size in mesh.axis_sizes.items() if size > 1 and axis not in used]

    def fitting(axes: tuple[str, ...]) -> list[int]:
        """The dims that these axes can split further."""
        return [dim for dim, split in enumerate(sharding.dims) if (*split, *axes) in allowed[dim]]

    for axes in _subsets(sharding.partial):
        yield AllReduce(axes)
        for dim in fitting(axes):
            yield ReduceScatter(axes, dim)
    for axes in _subsets(free):
        yield Mask(axes)
        for dim in fitting(axes):
            yield Slice(axes, dim)
    for dim, split in enumerate(sharding.dims):
        for count in range(1, len(split) + 1):
            yield AllGather(split[-count:], dim)
            for target in fitting(split[-count:]):
                if target != dim:
                    yield AllToAll(split[-count:], dim, target)
        for source_axis in split:
            for axis in free:
                replaced = tuple(axis if a == source_axis else a for a in split)
                if mesh.size_of(axis) == mesh.size_of(source_axis) and replaced in allowed[dim]:
                    both = tuple(a for a in mesh.axis_sizes if a in (source_axis, axis))
                    yield Permute(source_axis, axis, dim, both)


def _subsets(axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for count in range(1, len(axes) + 1):
        yield from itertools.combinations(axes, count)


def _on_dims(step: Step, dims: tuple[int, ...]) -> Step:
    """A step of the shared graph, on the tensor's dims."""
    match step:
        case AllGather(axes, dim) | ReduceScatter(axes, dim) | Slice(axes, dim):
            return type(step)(axes, dims[dim])
        case AllToAll(axes, source, target):
            return AllToAll(axes, dims[source], dims[target])
        case Permute(source_axis, target_axis, dim, axes):
            return Permute(source_axis, target_axis, dims[dim], axes)
        case _:
            return step
