"""Bytes alive on one device at each moment of the sharded program.

In:     `Body`, the mesh, which values are stored at all, which inputs are donated.
Out:    `Liveness`: bytes of arguments and results, the peak, when it is, and who is alive then.
Method: a copy lives from the instruction that makes it to its last reader. Inputs live throughout unless donated, then
        to their last reader. A loop's body adds its own peak; its stacked outputs live from before the loop. Values
        inside chains of pointwise operations take no memory of their own (`costs.py`): compilers fuse those.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from autopar._jax import Literal, Var
from autopar.intra_op.sharded import (
    Body,
    Compute,
    Copy,
    Fused,
    Instruction,
    Region,
    copies_made,
    copies_read,
    local_bytes,
)
from autopar.mesh import LogicalMesh


@dataclass(frozen=True, slots=True, eq=False)
class Liveness:
    """Memory of one device, in bytes.

    Attributes:
        argument_bytes: All program inputs.
        output_bytes: All program outputs.
        peak_bytes: Most bytes alive at once, arguments included.
        moment: Index of the top-level instruction at the peak.
        alive: Copies alive at the peak with their bytes, outermost body first; inner copies weighted once.
    """

    argument_bytes: int
    output_bytes: int
    peak_bytes: int
    moment: int
    alive: tuple[tuple[Copy, int], ...]


def measure_liveness(body: Body, mesh: LogicalMesh, stored: AbstractSet[Var], donated: Sequence[bool] = ()) -> Liveness:
    """Peak memory of a sharded program.

    Args:
        body: The program.
        mesh: Its mesh.
        stored: Values that take memory (`costs.stored_values`).
        donated: For each input, whether its memory may be reused after its last reader.
    """
    arguments = [local_bytes(var, sharding, mesh) for var, sharding in body.inputs]
    outputs = {(a, s): local_bytes(a, s, mesh) for a, s in body.outputs if not isinstance(a, Literal)}
    pinned = {copy for copy, freed in zip(body.inputs, donated or [False] * len(arguments), strict=True) if not freed}
    peak, moment, alive = _peak(body, mesh, stored, pinned)
    return Liveness(sum(arguments), sum(outputs.values()), peak, moment, tuple(alive))


def _peak(
    body: Body,
    mesh: LogicalMesh,
    stored: AbstractSet[Var],
    pinned: AbstractSet[Copy],
    free: AbstractSet[Copy] = frozenset(),
) -> tuple[int, int, list[tuple[Copy, int]]]:
    """(bytes, instruction, copies) at the fullest moment; copies in `free` are counted by the caller."""
    last: dict[Copy, int] = {}
    for position, instruction in enumerate(body.instructions):
        for copy in copies_read(instruction):
            last[copy] = position
    end = len(body.instructions)
    for atom, sharding in body.outputs:
        if not isinstance(atom, Literal):
            last[atom, sharding] = end
    for copy in pinned:
        last[copy] = end
    size = {copy: 0 if copy in free else local_bytes(*copy, mesh) for copy in body.inputs}
    alive = dict(size)
    total = sum(alive.values())
    best, moment, snapshot = total, -1, dict(alive)
    dying: dict[int, list[Copy]] = {}
    for copy, position in last.items():
        dying.setdefault(position, []).append(copy)
    for copy in body.inputs:
        if copy not in last:
            total -= alive.pop(copy)
    for position, instruction in enumerate(body.instructions):
        for copy in copies_made(instruction):
            var = copy[0]
            takes = local_bytes(*copy, mesh) if var in stored or not isinstance(instruction, Compute) else 0
            if copy not in alive:
                alive[copy] = takes
                total += takes
        inner, inner_alive = _inner_peak(instruction, mesh, stored)
        if total + inner > best:
            best, moment, snapshot = total + inner, position, {**alive, **dict(inner_alive)}
        for copy in dying.get(position, ()):
            total -= alive.pop(copy, 0)
        for copy in copies_made(instruction):
            if copy not in last:
                total -= alive.pop(copy, 0)
    return best, moment, [(copy, size) for copy, size in snapshot.items() if size]


def _inner_peak(
    instruction: Instruction, mesh: LogicalMesh, stored: AbstractSet[Var]
) -> tuple[int, list[tuple[Copy, int]]]:
    """What the bodies of a region need beyond its operands and results; branches take turns, so the largest counts."""
    if isinstance(instruction, Fused):
        # What is sent together is packed into one array, and arrives as one.
        packed = [local_bytes(m.var, m.source, mesh) + local_bytes(m.var, m.target, mesh) for m in instruction.moves]
        return sum(packed), []
    if not isinstance(instruction, Region):
        return 0, []
    best: tuple[int, list[tuple[Copy, int]]] = (0, [])
    is_scan = instruction.eqn.primitive.name == "scan"
    num_shared = len(instruction.eqn.invars)
    for body in instruction.bodies:
        num_whole = (
            sum(s == o for (_, s), o in zip(body.inputs, instruction.operands, strict=False)) if is_scan else num_shared
        )
        # A scan's constants and carries are the operands themselves; its scanned inputs arrive as slices of their own.
        shared = frozenset(body.inputs[:num_whole])
        needs, _, alive = _peak(body, mesh, stored, frozenset(), shared)
        if needs > best[0]:
            best = (needs, alive)
    return best
