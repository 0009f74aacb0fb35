"""Computes the bytes that are lost to gaps between arrays, where XLA gives each a fixed place in memory.

In:     a sharded body, the mesh, the held values.
Out:    `gap_bytes`: how far the highest place is above the most bytes alive at once.
Method: XLA places arrays after it has put the program in order: the largest first, or if that is better the longest-lived
        first, each in the smallest gap between those that are alive with it (`GlobalDecreasingSizeBestFitHeap` in
        `heap_simulator.cc`). The same is done here with live ranges as `liveness.py` knows them. The trips of a loop share
        their places. Arguments and results have memory of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import numpy as np

from autopar._jax import Var
from autopar.intra_op.liveness import shared_inputs, sized_versions, workspace_of
from autopar.intra_op.sharded import Body, Copy, Region
from autopar.mesh import LogicalMesh
from autopar.tuning import TUNING


class Range(NamedTuple):
    """An array that is alive from one moment to another, both included."""

    num_bytes: int
    begin: int
    end: int


def gap_bytes(body: Body, mesh: LogicalMesh, stored: Mapping[Var, int]) -> int:
    """Bytes that a program loses to gaps. `stored`: held values, with the factor on their bytes (`held.py`)."""
    found: list[Range] = []
    _add_ranges(found, 0, body, mesh, stored, frozenset(body.inputs), is_program=True)
    return lost_bytes(found)


def _add_ranges(
    found: list[Range],
    begin: int,
    body: Body,
    mesh: LogicalMesh,
    stored: Mapping[Var, int],
    elsewhere: AbstractSet[Copy],
    is_program: bool = False,
) -> int:
    """Add the live ranges of a body's arrays and of all inside it; returns the moment after it.

    Inputs among those `elsewhere` have memory already. A program's results have memory of their own.
    """
    made, size, _ = sized_versions(body, mesh, stored, frozenset(), elsewhere, given=is_program)
    count, own = len(body.instructions), body.results if is_program else {}
    first: list[int] = []  # moments of the instructions: of a loop, more than one
    for instruction in body.instructions:
        first.append(begin)
        if num_bytes := workspace_of(instruction, mesh):
            found.append(Range(num_bytes, begin, begin))
        begin += 1
        if isinstance(instruction, Region):
            for inner in instruction.bodies:
                begin = _add_ranges(found, begin, inner, mesh, stored, shared_inputs(instruction, inner))
    first.append(begin)
    for num_bytes, copy, start, end in zip(size, made.copies, made.starts, made.ends, strict=True):
        if num_bytes and not (end == count and copy in own):
            last = begin if end == count else first[max(start, end) + 1] - 1
            found.append(Range(num_bytes, first[max(start, 0)], max(first[max(start, 0)], last)))
    return begin


def lost_bytes(ranges: Sequence[Range]) -> int:
    """How far the highest place is above the most bytes alive at once; arrays of a small part of these do not count."""
    least = TUNING.placed_part * _alive_bytes(ranges)
    large = [array for array in ranges if array.num_bytes > least]
    alive = _alive_bytes(large)
    lost = _height(sorted(large, key=_by_size)) - alive
    return min(lost, _height(sorted(large, key=_by_duration)) - alive) if lost else 0


def _alive_bytes(ranges: Sequence[Range]) -> int:
    changes = sorted([(r.begin, r.num_bytes) for r in ranges] + [(r.end + 1, -r.num_bytes) for r in ranges])
    return max(itertools.accumulate(change for _, change in changes), default=0)


def _by_size(array: Range) -> tuple[int, int]:
    return -array.num_bytes, array.begin - array.end


def _by_duration(array: Range) -> tuple[int, int]:
    return array.begin - array.end, -array.num_bytes


def _height(ranges: Sequence[Range]) -> int:
    """The highest place, if each array in turn gets the smallest gap that it fits in."""
    begins, ends, lows, highs = np.zeros((4, len(ranges)), np.int64)
    for k, array in enumerate(ranges):
        among = np.flatnonzero((begins[:k] <= array.end) & (ends[:k] >= array.begin))
        among = among[np.argsort(lows[among], kind="stable")]
        tops = np.maximum.accumulate(np.concatenate(([0], highs[among])))
        gaps = lows[among] - tops[:-1]
        gaps[gaps < array.num_bytes] = np.iinfo(np.int64).max
        at = int(np.argmin(gaps)) if len(gaps) else 0
        low = tops[at] if len(gaps) and gaps[at] < np.iinfo(np.int64).max else tops[-1]
        begins[k], ends[k], lows[k], highs[k] = array.begin, array.end, low, low + array.num_bytes
    return int(highs.max(initial=0))
