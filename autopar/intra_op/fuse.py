"""Joins small collectives into one.

In:     a sharded program.
Out:    the same, with small moves of one kind over the same axes made one `Fused` where none waits for another.
Method: the *height* of a move is the largest number of small moves still to come on a path from it to the results.
        Moves of equal height never depend on each other, nor do groups of them in a circle, so all of one kind can be
        one message: all gradients of data parallelism are. Instructions are put in order again, each as early as it was
        where it can be. Large moves stay alone: there latency is nothing and packing would cost a copy.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

from autopar.cost.steps import AllGather, AllReduce, ReduceScatter
from autopar.intra_op.sharded import (
    Body,
    Copy,
    Fused,
    Instruction,
    Move,
    Region,
    copies_awaited,
    copies_made,
    copies_read,
    move_bytes,
)
from autopar.mesh import LogicalMesh
from autopar.tuning import TUNING

SMALL_BYTES = 4 << 20
"""A collective up to this size may be packed with others on any mesh."""
_COPIES = 4
"""How often a byte passes through memory that is packed and unpacked."""
BUCKET_BYTES = 64 << 20
"""At most so much is sent as one, and so bounded is what waiting for the others costs in memory."""


def small_bytes(mesh: LogicalMesh) -> float:
    """Size up to which a collective may be packed: where latency is a tenth of its time, but a quarter of a bucket.

    A ring over p devices takes (p - 1) hops of latency + bytes / (p * bandwidth) each. Where devices share a memory,
    packing and unpacking take what sending takes: both read and write every byte, at the link's rate.
    """
    links = [(mesh.size_of(axis), mesh.link_of(axis)) for axis in mesh.axis_names]
    even = max(size * link.latency_seconds * link.bytes_per_second for size, link in links)
    if all(link.shared_memory for _, link in links):
        return even / _COPIES
    return min(max(SMALL_BYTES, 9 * even), BUCKET_BYTES / 4)


def sent_together(mesh: LogicalMesh, num_bytes: float) -> LogicalMesh:
    """The mesh as a small collective sees it before it is known with which others it is sent: it bears a part of the latency.

    With which it is, the clock shows, and the part of its seconds that counts follows that (`exposure.py`).
    """
    share = max(TUNING.fused_latency, num_bytes / BUCKET_BYTES)
    links = tuple(dataclasses.replace(link, latency_seconds=link.latency_seconds * share) for link in mesh.links)
    return LogicalMesh(mesh.shape, mesh.axis_names, links)


def fuse_collectives(body: Body, mesh: LogicalMesh) -> Body:
    """Pack small moves that do not wait for each other, in the bodies of loops and branches too."""
    inside = [
        dataclasses.replace(i, bodies=tuple(fuse_collectives(inner, mesh) for inner in i.bodies))
        if isinstance(i, Region)
        else i
        for i in body.instructions
    ]
    return dataclasses.replace(body, instructions=_packed(inside, mesh))


def _packed(instructions: Sequence[Instruction], mesh: LogicalMesh) -> tuple[Instruction, ...]:
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
        if place not in together or filled[place] + num_bytes > BUCKET_BYTES:
            together.setdefault(place, []).append([])
            filled[place] = 0
        together[place][-1].append(position)
        filled[place] += num_bytes
    groups = [group for buckets in together.values() for group in buckets if len(group) > 1]
    return _in_order(instructions, needs, groups) if groups else tuple(instructions)


def _key(instruction: Instruction, mesh: LogicalMesh, small: float) -> object:
    """Moves with equal keys may be sent together; None for those that travel alone."""
    if not isinstance(instruction, Move) or not isinstance(instruction.step, AllReduce | AllGather | ReduceScatter):
        return None
    if move_bytes(instruction, mesh) > small:
        return None
    return type(instruction.step), instruction.step.axes, instruction.dtype


def _dependencies(instructions: Sequence[Instruction]) -> list[list[int]]:
    """For each instruction, those that come before it: the makers of what it reads; of what it recomputes, the readers
    of what was there."""
    maker: dict[Copy, int] = {}
    readers: dict[Copy, list[int]] = {}
    needs: list[list[int]] = []
    for position, instruction in enumerate(instructions):
        read, before, made = [], [], copies_made(instruction)
        for copy in (*copies_read(instruction), *copies_awaited(instruction)):
            at = maker.get(copy)
            if at is not None:
                read.append(copy)
                before.append(at)
        for copy in made:
            before += readers.pop(copy, ())
        needs.append([k for k in dict.fromkeys(before) if k != position])
        for copy in read:
            readers.setdefault(copy, []).append(position)
        for copy in made:
            maker[copy] = position
    return needs


def _heights(needs: Sequence[Sequence[int]], keys: Sequence[object]) -> list[int]:
    """Small moves still to come after each instruction, along the longest path."""
    heights = [0] * len(needs)
    for position in reversed(range(len(needs))):
        above = heights[position] + (keys[position] is not None)
        for earlier in needs[position]:
            heights[earlier] = max(heights[earlier], above)
    return heights


def _in_order(
    instructions: Sequence[Instruction], needs: Sequence[Sequence[int]], groups: Sequence[Sequence[int]]
) -> tuple[Instruction, ...]:
    """The instructions with each group as one, sorted so that everything is made before it is read."""
    leader = list(range(len(instructions)))
    members = {group[0]: group for group in groups}
    for group in groups:
        for position in group:
            leader[position] = group[0]
    waits: dict[int, set[int]] = {k: set() for k in dict.fromkeys(leader)}
    readers: dict[int, dict[int, None]] = {k: {} for k in waits}
    for position, earlier in enumerate(needs):
        for maker in earlier:
            waits[leader[position]].add(leader[maker])
            readers[leader[maker]][leader[position]] = None
    ready = [k for k, makers in waits.items() if not makers]
    heapq.heapify(ready)
    result: list[Instruction] = []
    while ready:
        position = heapq.heappop(ready)
        together = members.get(position)
        result.append(Fused(tuple(_moves(instructions, together))) if together else instructions[position])
        for reader in readers[position]:
            waits[reader].discard(position)
            if not waits[reader]:
                heapq.heappush(ready, reader)
    assert len(result) == len(waits), "moves of one height wait for each other"
    return tuple(result)


def _moves(instructions: Sequence[Instruction], group: Sequence[int]) -> list[Move]:
    return [move for k in group if isinstance(move := instructions[k], Move)]
