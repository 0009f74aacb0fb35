"""Fuses small collectives.

In:     a sharded program.
Out:    the same, with independent small moves of one kind over the same axes replaced by one `Fused`.
Method: the *height* of a move is the largest number of small moves after it on a path to the results. Moves of equal
        height do not depend on each other, and groups of them form no cycles, so all of one kind can be one message, as
        all gradients of data parallelism are. Instructions are then sorted topologically, close to their old order. Large
        moves stay separate: for them latency is negligible, and packing would cost a copy.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

from autopar.cost.steps import AllGather, AllReduce, ReduceScatter
from autopar.intra_op.host_order import fetched_late
from autopar.intra_op.sharded import (
    BUCKET_BYTES,
    Body,
    Compute,
    Copy,
    Fused,
    Instruction,
    Move,
    Region,
    copies_awaited,
    move_bytes,
)
from autopar.mesh import LogicalMesh
from autopar.tuning import TUNING

SMALL_BYTES = 4 << 20
"""Collectives up to this size may be fused on any mesh."""
_COPIES = 4
"""Memory accesses per byte for packing and unpacking."""


def small_bytes(mesh: LogicalMesh) -> float:
    """Bytes up to which a collective may be fused: where latency is a tenth of its time, at most a quarter of a bucket.

    A ring over p devices takes (p - 1) hops of latency + bytes / (p * bandwidth) each. Where devices share memory,
    packing and unpacking cost as much as sending: both read and write every byte, at the link's rate.
    """
    links = [(mesh.size_of(axis), mesh.link_of(axis)) for axis in mesh.axis_names]
    even = max(size * link.latency_seconds * link.bytes_per_second for size, link in links)
    if all(link.shared_memory for _, link in links):
        return even / _COPIES
    return min(max(SMALL_BYTES, 9 * even), BUCKET_BYTES / 4)


def sent_together(mesh: LogicalMesh, num_bytes: float) -> LogicalMesh:
    """The mesh by which a small collective is priced before it is known how many are fused: with a fraction of the latency.

    The clock then shows how many are fused, and the price follows that (`exposure.py`).
    """
    share = max(TUNING.fused_latency, num_bytes / BUCKET_BYTES)
    links = tuple(dataclasses.replace(link, latency_seconds=link.latency_seconds * share) for link in mesh.links)
    return LogicalMesh(mesh.shape, mesh.axis_names, links)


def fuse_collectives(body: Body, mesh: LogicalMesh, bucket: int = BUCKET_BYTES) -> Body:
    """Fuse independent small moves, up to `bucket` bytes in one, also in the bodies of loops and branches."""
    inside = [
        dataclasses.replace(i, bodies=tuple(fuse_collectives(inner, mesh, bucket) for inner in i.bodies))
        if isinstance(i, Region)
        else i
        for i in body.instructions
    ]
    return dataclasses.replace(body, instructions=_packed(inside, mesh, bucket), bucket=bucket)


def _packed(instructions: Sequence[Instruction], mesh: LogicalMesh, bucket: int) -> tuple[Instruction, ...]:
    small = small_bytes(mesh)
    keys = [_key(instruction, mesh, small) for instruction in instructions]
    if len(keys) - keys.count(None) < 2:
        return tuple(instructions)
    needs = _dependencies(instructions)
    heights = _heights(needs, keys)
    together: dict[object, list[list[int]]] = {}
    filled: dict[object, int] = {}
    for position, (instruction, key) in enumerate(zip(instructions, keys, strict=True)):
        if key is None or not isinstance(instruction, Move):
            continue
        place, num_bytes = (key, heights[position]), move_bytes(instruction, mesh)
        if place not in together or filled[place] + num_bytes > bucket:
            together.setdefault(place, []).append([])
            filled[place] = 0
        together[place][-1].append(position)
        filled[place] += num_bytes
    groups = [group for buckets in together.values() for group in buckets if len(group) > 1]
    return fetched_late(_in_order(instructions, needs, groups)) if groups else tuple(instructions)


def _key(instruction: Instruction, mesh: LogicalMesh, small: float) -> object:
    """Moves with equal keys may be fused; None: the instruction is not fused."""
    if not isinstance(instruction, Move) or not isinstance(instruction.step, AllReduce | AllGather | ReduceScatter):
        return None
    if move_bytes(instruction, mesh) > small:
        return None
    return type(instruction.step), instruction.step.axes, instruction.dtype


def _dependencies(instructions: Sequence[Instruction]) -> list[list[int]]:
    """Per instruction, those that must come before it: makers of its operands, and readers of copies that it redefines."""
    maker: dict[Copy, int] = {}
    readers: dict[Copy, list[int]] = {}
    needs: list[list[int]] = []
    for position, instruction in enumerate(instructions):
        made = instruction.makes
        waited = instruction.reads
        if not isinstance(instruction, Compute):
            waited = (*waited, *copies_awaited(instruction))
        read = [copy for copy in waited if copy in maker]
        before = [maker[copy] for copy in read]
        for copy in made:
            if copy in readers:
                before += readers.pop(copy)
        # The common case, fast: one or two operands.
        needs.append(before if len(before) < 2 else list(dict.fromkeys(before)))
        for copy in read:
            if copy in readers:
                readers[copy].append(position)
            else:
                readers[copy] = [position]
        for copy in made:
            maker[copy] = position
    return needs


def _heights(needs: Sequence[Sequence[int]], keys: Sequence[object]) -> list[int]:
    """Largest number of small moves after each instruction on a path."""
    heights = [0] * len(needs)
    for position in reversed(range(len(needs))):
        above = heights[position] + (keys[position] is not None)
        for earlier in needs[position]:
            heights[earlier] = max(heights[earlier], above)
    return heights


def _in_order(
    instructions: Sequence[Instruction], needs: Sequence[Sequence[int]], groups: Sequence[Sequence[int]]
) -> tuple[Instruction, ...]:
    """The instructions with each group fused, in topological order."""
    leader = list(range(len(instructions)))
    members = {group[0]: group for group in groups}
    for group in groups:
        for position in group:
            leader[position] = group[0]
    missing = [0] * len(instructions)  # unfinished predecessors, with their multiplicity in `readers`
    readers: list[list[int]] = [[] for _ in instructions]
    for position, earlier in zip(leader, needs, strict=True):
        missing[position] += len(earlier)
        for maker in earlier:
            readers[leader[maker]].append(position)
    ready = [k for k, first in enumerate(leader) if k == first and not missing[k]]
    result: list[Instruction] = []
    while ready:
        position = heapq.heappop(ready)
        together = members.get(position)
        result.append(Fused(tuple(_moves(instructions, together))) if together else instructions[position])
        for reader in readers[position]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, reader)
    num_joined = sum(len(group) - 1 for group in groups)
    assert len(result) == len(instructions) - num_joined, "moves of one height wait for each other"
    return tuple(result)


def _moves(instructions: Sequence[Instruction], group: Sequence[int]) -> list[Move]:
    return [move for k in group if isinstance(move := instructions[k], Move)]
