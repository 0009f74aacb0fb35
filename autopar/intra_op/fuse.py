"""Send small collectives together.

In:     instructions of one body, in order.
Out:    the same, with moves of one kind over the same axes that are ready together made one `Fused`.
Method: at the first of them that is needed, all later ones whose operands are ready join it, up to a bucket. Large ones
        stay alone: there latency is nothing and packing would cost a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost.steps import AllGather, AllReduce, ReduceScatter
from autopar.intra_op.sharded import Compute, Copy, Fused, Instruction, Move, Region, move_bytes
from autopar.mesh import LogicalMesh

SMALL_BYTES = 4 << 20
"""A collective larger than this is not packed with others."""
BUCKET_BYTES = 32 << 20
"""At most so much is sent as one."""


def fuse_collectives(instructions: Sequence[Instruction], mesh: LogicalMesh) -> tuple[Instruction, ...]:
    """Pack small moves that are ready together; the first needed decides where."""
    ready: dict[Copy, int] = {}
    waiting: dict[object, list[int]] = {}
    for position, instruction in enumerate(instructions):
        for copy in _made(instruction):
            ready.setdefault(copy, position)
        key = _key(instruction, mesh)
        if key is not None:
            waiting.setdefault(key, []).append(position)
    taken: set[int] = set()
    result: list[Instruction] = []
    for position, instruction in enumerate(instructions):
        if position in taken:
            continue
        key = _key(instruction, mesh)
        if key is None:
            result.append(instruction)
            continue
        bucket, num_bytes = [instruction], move_bytes(instruction, mesh)
        for later in waiting[key]:
            other = instructions[later]
            if later <= position or later in taken or ready.get((other.var, other.source), -1) >= position:
                continue
            size = move_bytes(other, mesh)
            if num_bytes + size <= BUCKET_BYTES:
                bucket.append(other)
                taken.add(later)
                num_bytes += size
                ready[other.var, other.target] = position
        waiting[key] = [p for p in waiting[key] if p > position and p not in taken]
        result.append(Fused(tuple(bucket)) if len(bucket) > 1 else instruction)
    return tuple(result)


def _key(instruction: Instruction, mesh: LogicalMesh) -> object:
    """Moves with equal keys may be sent together; None for those that travel alone."""
    if not isinstance(instruction, Move) or not isinstance(instruction.step, AllReduce | AllGather | ReduceScatter):
        return None
    if move_bytes(instruction, mesh) > SMALL_BYTES:
        return None
    return type(instruction.step), instruction.step.axes, instruction.var.aval.dtype


def _made(instruction: Instruction) -> list[Copy]:
    match instruction:
        case Move(var, _, target):
            return [(var, target)]
        case Fused(moves):
            return [(move.var, move.target) for move in moves]
        case Compute(eqn, _, strategy):
            return list(zip(eqn.outvars, strategy.results, strict=True))
        case Region(eqn, _, results):
            return list(zip(eqn.outvars, results, strict=True))
