"""Cheapest reshard."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from dataclasses import dataclass

import numpy as np

from autopar.cost.collectives import collective_seconds
from autopar.mesh import Sharding


@dataclass(frozen=True, slots=True)
class AllReduce:
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AllGather:
    axes: tuple[str, ...]
    dim: int


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    axes: tuple[str, ...]
    dim: int


@dataclass(frozen=True, slots=True)
class AllToAll:
    axes: tuple[str, ...]
    source_dim: int
    target_dim: int


@dataclass(frozen=True, slots=True)
class Slice:
    axes: tuple[str, ...]
    dim: int


@dataclass(frozen=True, slots=True)
class Mask:
    axes: tuple[str, ...]


Step = AllReduce | AllGather | ReduceScatter | AllToAll | Slice | Mask


@dataclass(frozen=True, slots=True)
class Reshard:
    steps: tuple[Step, ...]
    seconds: float


def apply_to_sharding(step, sharding):
    dims, partial = [list(d) for d in sharding.dims], sharding.partial
    match step:
        case AllReduce(axes):
            partial = tuple(a for a in partial if a not in axes)
        case AllGather(axes, dim):
            dims[dim] = dims[dim][: -len(axes)]
        case ReduceScatter(axes, dim):
            partial = tuple(a for a in partial if a not in axes)
            dims[dim] += axes
        case AllToAll(axes, s, t):
            dims[s] = dims[s][: -len(axes)]
            dims[t] += axes
        case Slice(axes, dim):
            dims[dim] += axes
        case Mask(axes):
            partial = partial + axes
    return Sharding(tuple(map(tuple, dims)), partial)


def _bytes(shape, itemsize, s, mesh):
    return math.prod(s.local_shape(shape, mesh)) * itemsize


@functools.lru_cache(maxsize=200_000)
def cheapest_reshard(shape, itemsize, source, target, mesh):
    order = {a: k for k, a in enumerate(mesh.axis_sizes)}
    names = list(mesh.axis_sizes)
    groups = [g for n in range(1, len(names) + 1) for g in itertools.combinations(names, n)]
    count = itertools.count()
    heap, seen = [(0.0, 0, next(count), source, ())], set()
    while heap:
        cost, hops, _, at, path = heapq.heappop(heap)
        if at == target:
            return Reshard(path, sum(c for c in [cost]))
        if at in seen:
            continue
        seen.add(at)
        used = {a for d in at.dims for a in d} | set(at.partial)
        for axes in groups:
            candidates = []
            n = math.prod(mesh.size_of(a) for a in axes)
            if set(axes) <= set(at.partial):
                candidates.append(("all-reduce", AllReduce(axes)))
            free = not used.intersection(axes)
            ordered = all(order[a] >= 0 for a in axes)
            if free and set(axes) <= set(target.partial):
                candidates.append((None, Mask(axes)))
            for d, dim in enumerate(at.dims):
                local = at.local_shape(shape, mesh)[d]
                fits = local % n == 0 and (not dim or order[dim[-1]] < order[axes[0]])
                if fits and set(axes) <= set(at.partial):
                    candidates.append(("reduce-scatter", ReduceScatter(axes, d)))
                if fits and free:
                    candidates.append((None, Slice(axes, d)))
                if dim[len(dim) - len(axes):] == axes:
                    candidates.append(("all-gather", AllGather(axes, d)))
                    for t, other in enumerate(at.dims):
                        if t != d and at.local_shape(shape, mesh)[t] % n == 0 and (not other or order[other[-1]] < order[axes[0]]):
                            candidates.append(("all-to-all", AllToAll(axes, d, t)))
            for kind, step in candidates:
                new = apply_to_sharding(step, at)
                new = Sharding(new.dims, tuple(sorted(new.partial, key=order.__getitem__)))
                if new in seen:
                    continue
                seconds = 0.0
                if kind:
                    seconds = collective_seconds(kind, _bytes(shape, itemsize, new if kind == "all-gather" else at, mesh), axes, mesh)
                heapq.heappush(heap, (cost + seconds, hops + 1, next(count), new, (*path, step)))
    raise ValueError(f"no reshard from {source} to {target}")


@functools.lru_cache(maxsize=10000)
def reshard_seconds(shape, itemsize, sources, targets, mesh):
    out = np.empty((len(sources), len(targets)))
    for i, s in enumerate(sources):
        for j, t in enumerate(targets):
            out[i, j] = cheapest_reshard(shape, itemsize, s, t, mesh).seconds
    return out
