"""Computes the bytes that are lost to gaps between arrays, where XLA gives each a fixed place in memory.

In:     a sharded body, the mesh, the held values.
Out:    `gap_bytes`: how far the highest place is above the most bytes alive at once.
Method: arguments have memory of their own, and so have, from the start, results that do not overwrite any. An array that is
        no larger than such a result takes its memory while it is not made (`MaybeAssignBuffer` in `buffer_assignment.cc`).
        XLA places the others after it has put the program in order: the largest first, or if that is better the
        longest-lived first, each in the smallest gap between those that are alive with it
        (`GlobalDecreasingSizeBestFitHeap` in `heap_simulator.cc`). The same is done here with live ranges as `liveness.py`
        knows them. The trips of a loop share their places.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import numpy as np

from autopar._jax import Var
from autopar.intra_op.liveness import Liveness, new_sums, rows_of_stacks, shared_inputs, sized_versions, workspace_of
from autopar.intra_op.sharded import Body, Copy, Region, local_bytes
from autopar.intra_op.versions import Versions
from autopar.mesh import LogicalMesh
from autopar.tuning import TUNING

_NOWHERE = np.iinfo(np.int64).max
"""In place of the size of a gap that an array does not fit in."""


class Range(NamedTuple):
    """An array that is alive from one moment to another, both included."""

    num_bytes: int
    begin: int
    end: int


def gap_bytes(
    body: Body,
    mesh: LogicalMesh,
    stored: Mapping[Var, int],
    in_place: AbstractSet[Copy] = frozenset(),
    liveness: Liveness | None = None,
) -> int:
    """Bytes that a program loses to gaps, and to results before they are made.

    Args:
        body: The program.
        mesh: Its mesh.
        stored: Held values, with the factor on their bytes (`held.py`).
        in_place: Results that overwrite inputs.
        liveness: Its memory, if that is known (`measure_liveness`).
    """
    found: list[Range] = []
    results: dict[Copy, Range] = {}
    made = None if liveness is None else liveness.versions
    _add_ranges(found, 0, body, mesh, stored, frozenset(body.inputs), results, made=made)
    return lost_bytes(found, [results[copy] for copy in results if copy not in in_place])


def _add_ranges(
    found: list[Range],
    begin: int,
    body: Body,
    mesh: LogicalMesh,
    stored: Mapping[Var, int],
    elsewhere: AbstractSet[Copy],
    results: dict[Copy, Range] | None = None,
    rows: AbstractSet[Copy] = frozenset(),
    made: Versions | None = None,
    in_place: AbstractSet[Copy] = frozenset(),
) -> int:
    """Add the live ranges of a body's arrays and of all inside it; returns the moment after it.

    Inputs among those `elsewhere` have memory already, as have copies `in_place`, which overwrite some. Of a program, those of
    results go to `results`. `made`: the versions of the body's copies, if they are known.
    """
    how = mesh, stored, frozenset[Copy](), elsewhere
    made, size, _ = sized_versions(body, *how, in_place=in_place, given=results is not None, rows=rows, made=made)
    count, own = len(body.instructions), body.results if results is not None else {}
    first: list[int] = []  # moments of the instructions: of a loop, more than one
    for position, instruction in enumerate(body.instructions):
        first.append(begin)
        turned = made.turned.get(position)
        if num_bytes := workspace_of(instruction, mesh) if turned is None else local_bytes(*turned, mesh):
            found.append(Range(num_bytes, begin, begin))
        begin += 1
        if isinstance(instruction, Region):
            for inner in instruction.bodies:
                shared, sliced = shared_inputs(instruction, inner), rows_of_stacks(instruction, inner)
                sums = new_sums(instruction)
                begin = _add_ranges(found, begin, inner, mesh, stored, shared, rows=sliced, in_place=sums)
    first.append(begin)
    for num_bytes, copy, start, end in zip(size, made.copies, made.starts, made.ends, strict=True):
        if num_bytes:
            last = begin if end == count else first[max(start, end) + 1] - 1
            array = Range(num_bytes, first[max(start, 0)], max(first[max(start, 0)], last))
            if results is not None and end == count and copy in own:
                results[copy] = array
            else:
                found.append(array)
    return begin


def lost_bytes(ranges: Sequence[Range], results: Sequence[Range] = ()) -> int:
    """How far the highest place is above the most bytes alive at once; arrays of a small part of these do not count.

    `results`: those that have memory of their own.
    """
    least = TUNING.placed_part * _alive_bytes([*ranges, *results])
    large = [array for array in ranges if array.num_bytes > least]
    alive = _alive_bytes([*large, *results]) - sum(result.num_bytes for result in results)
    placed = _beside(large, results)
    lost = _height(sorted(placed, key=_by_size)) - alive
    return min(lost, _height(sorted(placed, key=_by_duration)) - alive) if lost else 0


def _beside(ranges: Sequence[Range], results: Sequence[Range]) -> Sequence[Range]:
    """The arrays that do not take the memory of a result."""
    if not results:
        return ranges
    taken = [[result] for result in sorted(results)]
    rest: list[Range] = []
    for array in sorted(ranges, key=_by_size):
        places = (place for place in taken if place[0].num_bytes >= array.num_bytes)
        next((p for p in places if all(array.end < o.begin or o.end < array.begin for o in p)), rest).append(array)
    return rest


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
        gaps[gaps < array.num_bytes] = _NOWHERE
        at = int(gaps.argmin()) if len(gaps) else 0
        low = tops[at] if len(gaps) and gaps[at] < _NOWHERE else tops[-1]
        begins[k], ends[k], lows[k], highs[k] = array.begin, array.end, low, low + array.num_bytes
    return int(highs.max(initial=0))
