"""Fuses small collectives.

In:     a sharded program.
Out:    the same, with independent small moves of one kind over the same axes replaced by one `Fused`.
Method: the *height* of a move is the largest number of small moves after it on a path to the results. Moves of equal
        height do not depend on each other, and groups of them form no cycles, so all of one kind can be one message, as
        all gradients of data parallelism are. Instructions are then sorted topologically, close to their old order. Large
        moves stay separate: for them latency is negligible, and packing would cost a copy. Sums of which each device keeps
        its slice become reduce-scatters where their message takes less time so: alone, each might have taken less as an
        all-reduce, and its route was chosen before its message was known.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Container, Sequence

from autopar.cost import collective_seconds
from autopar.cost.steps import AllGather, AllReduce, ReduceScatter, Slice
from autopar.intra_op.host_order import fetched_late
from autopar.intra_op.sharded import (
    BUCKET_BYTES,
    Body,
    Copy,
    Fused,
    Instruction,
    Move,
    move_bytes,
    with_bodies,
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
    inside = [with_bodies(i, lambda inner: fuse_collectives(inner, mesh, bucket)) for i in body.instructions]
    packed = _packed(inside, mesh, bucket, body.results)
    return dataclasses.replace(body, instructions=packed, bucket=bucket)


def _packed(
    instructions: Sequence[Instruction], mesh: LogicalMesh, bucket: int, results: Container[Copy]
) -> tuple[Instruction, ...]:
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
    scattered = _scattered(instructions, groups, mesh, results)
    if scattered:
        kept = [i for i in instructions if not isinstance(i, Move) or scattered.get((i.var, i.source)) is not i]
        made = [_as_scatter(i, scattered[i.makes[0]]) if i.makes and i.makes[0] in scattered else i for i in kept]
        return _packed(made, mesh, bucket, results)
    return fetched_late(_in_order(instructions, needs, groups)) if groups else tuple(instructions)


def _scattered(
    instructions: Sequence[Instruction], groups: Sequence[Sequence[int]], mesh: LogicalMesh, results: Container[Copy]
) -> dict[Copy, Move]:
    """Reduced copies -> their only readers, slices: of messages that take less time as reduce-scatters."""
    sums = {move.makes[0]: move for group in groups for move in _moves(instructions, group) if _is_sum(move)}
    readers: dict[Copy, list[Instruction]] = {copy: [] for copy in sums if copy not in results}
    for instruction in instructions if readers else ():
        for copy in instruction.needs:
            if copy in readers:
                readers[copy].append(instruction)
    slices = {
        copy: reader
        for copy, (reader, *others) in readers.items()
        if not others and isinstance(reader, Move) and _takes_own_part(reader, sums[copy])
    }
    found: dict[Copy, Move] = {}
    for group in groups:
        moves = [move for move in _moves(instructions, group) if _is_sum(move)]
        own = [move for move in moves if move.makes[0] in slices]
        total, part = (sum(move_bytes(move, mesh) for move in those) for those in (moves, own))
        if own and _is_faster_apart(total, part, own[0].step.axes, mesh):
            found |= {move.makes[0]: slices[move.makes[0]] for move in own}
    return found


def _is_sum(move: Move) -> bool:
    return isinstance(move.step, AllReduce)


def _takes_own_part(reader: Move, sum_: Move) -> bool:
    """Whether a move keeps of a sum over devices what a reduce-scatter of it leaves on each; packing sorts it by devices."""
    step = reader.step
    return isinstance(step, Slice) and sorted(step.axes) == sorted(sum_.step.axes) and reader.earlier is None


def _is_faster_apart(num_bytes: float, part: float, axes: tuple[str, ...], mesh: LogicalMesh) -> bool:
    """Whether an all-reduce takes longer than a reduce-scatter of a part of it and an all-reduce of the rest."""
    rest = collective_seconds("all-reduce", num_bytes - part, axes, mesh) if part < num_bytes else 0.0
    apart = collective_seconds("reduce-scatter", part, axes, mesh) + rest
    return apart < collective_seconds("all-reduce", num_bytes, axes, mesh)


def _as_scatter(instruction: Instruction, reader: Move) -> Move:
    """A sum over devices and the slice of it as one move."""
    assert isinstance(instruction, Move) and isinstance(reader.step, Slice)
    return dataclasses.replace(instruction, target=reader.target, step=ReduceScatter(reader.step.axes, reader.step.dim))


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
        before: list[int] = []
        for copy in instruction.needs:
            made_at = maker.get(copy)
            if made_at is not None:
                before.append(made_at)
                readers[copy].append(position)
        for copy in instruction.makes:
            earlier = readers.get(copy)
            if earlier:  # redefined
                before += [reader for reader in earlier if reader != position]
            maker[copy], readers[copy] = position, [reader for reader in earlier or () if reader == position]
        # The common case, fast: one or two operands.
        needs.append(before if len(before) < 2 else list(dict.fromkeys(before)))
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
