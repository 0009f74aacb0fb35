"""Bytes alive on one device at each moment of the sharded program.

In:     `Body`, the mesh, which values are stored at all, which inputs are donated.
Out:    `Liveness`: bytes of arguments and results, the peak, when it is, and who is alive then.
Method: a copy lives from the instruction that makes it to its last reader. What a scatter or a loop is the last to read, it
        changes where it lies. Inputs live throughout unless donated, then to their last reader. A loop's body adds its own
        peak; its stacked outputs live from before the loop. Values inside kernels take no memory of their own
        (`traffic.py`): what they are made from is read where they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from autopar._jax import Literal, Var
from autopar.cost.steps import step_kind
from autopar.intra_op.sharded import (
    Body,
    Compute,
    Copy,
    Fused,
    Instruction,
    Move,
    Region,
    copies_made,
    copies_read,
    local_bytes,
)
from autopar.intra_op.traffic import is_in_place
from autopar.ir.region import kind_of, region_of
from autopar.mesh import LogicalMesh

_FALLEN = 0.99
"""Where memory has fallen to this share of a peak, the next peak is another one."""


_Version = tuple[Copy, int]
"""A copy, and the place of the instruction that made it."""


@dataclass(frozen=True, slots=True, eq=False)
class Alive:
    """A copy that is alive at some moment.

    Attributes:
        copy: The value and its sharding.
        num_bytes: On one device.
        body: Where it is: the program, or the body of a loop or branch.
        position: The moment: index of an instruction there.
    """

    copy: Copy
    num_bytes: int
    body: Body
    position: int


@dataclass(frozen=True, slots=True, eq=False)
class Liveness:
    """Memory of one device, in bytes.

    Attributes:
        argument_bytes: All program inputs.
        output_bytes: All program outputs.
        peak_bytes: Most bytes alive at once, arguments included.
        moment: Index of the top-level instruction at the peak.
        alive: Copies alive at the peak, outermost body first; inner copies weighted once.
        packed: Moves that are being sent as one at the peak, packed into an array of their own.
        at: The innermost instruction at the peak; None: the beginning.
    """

    argument_bytes: int
    output_bytes: int
    peak_bytes: int
    moment: int
    alive: tuple[Alive, ...]
    packed: tuple[Move, ...] = ()
    at: Instruction | None = None


def measure_liveness(body: Body, mesh: LogicalMesh, stored: AbstractSet[Var], donated: Sequence[bool] = ()) -> Liveness:
    """Memory of a sharded program at its fullest moment.

    Args:
        body: The program.
        mesh: Its mesh.
        stored: Values that take memory (`costs.stored_values`).
        donated: For each input, whether its memory may be reused after its last reader.
    """
    return fullest_moments(body, mesh, stored, donated)[0]


def fullest_moments(
    body: Body,
    mesh: LogicalMesh,
    stored: AbstractSet[Var],
    donated: Sequence[bool] = (),
    count: int = 1,
    elsewhere: AbstractSet[Var] = frozenset(),
) -> tuple[Liveness, ...]:
    """Memory of a sharded program at up to `count` moments, each the fullest of its part of the program, fullest first.

    A moment's part ends where memory has fallen by a hundredth. Values `elsewhere` take no memory here. The other
    arguments as of `measure_liveness`.
    """
    arguments = [local_bytes(var, sharding, mesh) for var, sharding in body.inputs]
    outputs = {(a, s): local_bytes(a, s, mesh) for a, s in body.outputs if not isinstance(a, Literal)}
    pinned = {copy for copy, freed in zip(body.inputs, donated or [False] * len(arguments), strict=True) if not freed}
    peaks = _peaks(body, mesh, stored, pinned, count, elsewhere=elsewhere)
    return tuple(
        Liveness(sum(arguments), sum(outputs.values()), peak.bytes, peak.moment, peak.alive, peak.packed, peak.at)
        for peak in peaks
    )


def memory_curve(body: Body, mesh: LogicalMesh, stored: AbstractSet[Var], donated: Sequence[bool] = ()) -> list[int]:
    """Bytes alive at each instruction, those inside it at their most; arguments as of `measure_liveness`."""
    pinned = {copy for copy, freed in zip(body.inputs, donated or [False] * len(body.inputs), strict=True) if not freed}
    curve: list[int] = []
    _peaks(body, mesh, stored, pinned, 1, curve=curve)
    return curve


@dataclass(frozen=True, slots=True, eq=False)
class _Peak:
    """The fullest moment of a body: who is alive, and which moves are packed."""

    bytes: int
    moment: int
    alive: tuple[Alive, ...]
    packed: tuple[Move, ...] = ()
    at: Instruction | None = None


def _peaks(
    body: Body,
    mesh: LogicalMesh,
    stored: AbstractSet[Var],
    pinned: AbstractSet[Copy],
    count: int,
    free: AbstractSet[Copy] = frozenset(),
    elsewhere: AbstractSet[Var] = frozenset(),
    curve: list[int] | None = None,
) -> list[_Peak]:
    """The `count` fullest moments, each of a part of the body, fullest first.

    Copies in `free` are counted by the caller, values `elsewhere` by no one. What is alive at each instruction is added to
    `curve`.
    """
    last, over = _lifetimes(body, pinned, stored)
    alive: dict[_Version, int] = {
        (copy, -1): 0 if copy in free or copy[0] in elsewhere else local_bytes(*copy, mesh) for copy in body.inputs
    }
    total = sum(alive.values())
    size = dict(alive)
    peaks: list[_Peak] = []
    most = _Peak(total, -1, ())
    dying: dict[int, list[_Version]] = {}
    for made, position in last.items():
        dying.setdefault(position, []).append(made)
    for copy in body.inputs:
        if (copy, -1) not in last:
            total -= alive.pop((copy, -1))
    start = dict.fromkeys(body.inputs, -1)
    for position, instruction in enumerate(body.instructions):
        sent = [
            Alive(copy, local_bytes(*copy, mesh), body, position)
            for copy in _sent(instruction, stored)
            if start[copy] >= 0 and not alive.get((copy, start[copy]), 1) and copy[0] not in elsewhere
        ]
        start.update(dict.fromkeys(copies_made(instruction), position))
        for copy in copies_made(instruction):
            var = copy[0]
            is_stored = (var in stored or not isinstance(instruction, Compute)) and var not in elsewhere
            alive[copy, position] = size[copy, position] = local_bytes(*copy, mesh) if is_stored else 0
            total += alive[copy, position]
            for source in over.get((copy, position), ()):
                if last.get(source) == position and alive.get(source, 0) == alive[copy, position] > 0:
                    total -= alive.pop(source)
                    last[source] = position - 1
                    break
        inner = _inner_peak(instruction, mesh, stored)
        now = total + inner.bytes + sum(each.num_bytes for each in sent)
        if curve is not None:
            curve.append(now)
        if now < _FALLEN * most.bytes:
            peaks.append(most)
            most = _Peak(0, position, ())
        if now > most.bytes:
            most = _Peak(now, position, (*sent, *inner.alive), inner.packed, inner.at or instruction)
        for made in dying.get(position, ()):
            total -= alive.pop(made, 0)
        for copy in copies_made(instruction):
            if (copy, position) not in last:
                total -= alive.pop((copy, position), 0)
    # Who is alive is looked up in the end: most instructions of a step are fuller than all before them.
    fullest = sorted((*peaks, most), key=lambda peak: -peak.bytes)[:count]
    return [dataclasses.replace(p, alive=(*_at(body, p.moment, size, last), *p.alive)) for p in fullest]


def _sent(instruction: Instruction, stored: AbstractSet[Var]) -> list[Copy]:
    """Copies inside kernels that a collective takes: they go through memory, if only for that."""
    if isinstance(instruction, Move) and step_kind(instruction.step) is not None and instruction.var not in stored:
        return [(instruction.var, instruction.source)]
    return []


def _at(body: Body, moment: int, size: Mapping[_Version, int], last: Mapping[_Version, int]) -> Iterator[Alive]:
    """Copies that are alive at a moment: made by then, and read there or later; or made there."""
    for version, num_bytes in size.items():
        copy, start = version
        if num_bytes and start <= moment and (start == moment or last.get(version, -1) >= moment):
            yield Alive(copy, num_bytes, body, moment)


def _lifetimes(
    body: Body, pinned: AbstractSet[Copy], stored: AbstractSet[Var]
) -> tuple[dict[_Version, int], dict[_Version, tuple[_Version, ...]]]:
    """Where each copy is read last, and over which others it may be written.

    A copy that is made again is another. What takes no memory is computed where it is read: what it is made from is read
    there, too.
    """
    start = dict.fromkeys(body.inputs, -1)
    last: dict[_Version, int] = {(copy, -1): len(body.instructions) for copy in pinned}
    # What a copy that takes no memory is made from.
    made_from: dict[_Version, tuple[_Version, ...]] = {}
    over: dict[_Version, tuple[_Version, ...]] = {}

    def read(copy: Copy, position: int) -> tuple[_Version, ...]:
        version = copy, start[copy]
        sources = made_from.get(version, (version,))
        for each in (version, *sources):
            last[each] = max(position, last.get(each, 0))
        return sources

    for position, instruction in enumerate(body.instructions):
        operands = [read(copy, position) for copy in copies_read(instruction)]
        start.update(dict.fromkeys(copies_made(instruction), position))
        if isinstance(instruction, Compute):
            sources = tuple(dict.fromkeys(source for found in operands for source in found))
            for copy in copies_made(instruction):
                if copy[0] not in stored:
                    made_from[copy, position] = sources
                elif is_in_place(instruction.eqn) and operands:
                    over[copy, position] = operands[0]
        elif isinstance(instruction, Region):
            over.update(_carried(instruction, position, start))
    for atom, sharding in body.outputs:
        if not isinstance(atom, Literal):
            read((atom, sharding), len(body.instructions))
    return last, over


def _carried(
    region: Region, position: int, start: Mapping[Copy, int]
) -> Iterator[tuple[_Version, tuple[_Version, ...]]]:
    """The results of a loop that are written over what they were before it."""
    results = dict(zip(region.eqn.outvars, region.results, strict=True))
    read = zip(region.eqn.invars, region.operands, strict=True)
    operands = {atom: sharding for atom, sharding in read if isinstance(atom, Var)}
    for b in region_of(region.eqn).of_role("carry", "through"):
        if b.result in results and isinstance(b.outer, Var):
            copy = b.outer, operands[b.outer]
            yield ((b.result, results[b.result]), position), ((copy, start.get(copy, -1)),)


def packed_bytes(move: Move, mesh: LogicalMesh) -> int:
    """What sending a move together with others takes: it is packed into one array, and arrives as one."""
    return local_bytes(move.var, move.source, mesh) + local_bytes(move.var, move.target, mesh)


def _inner_peak(instruction: Instruction, mesh: LogicalMesh, stored: AbstractSet[Var]) -> _Peak:
    """What the bodies of a region need beyond its operands and results; branches take turns, so the largest counts."""
    if isinstance(instruction, Fused):
        return _Peak(sum(packed_bytes(move, mesh) for move in instruction.moves), 0, (), instruction.moves)
    most = _Peak(0, 0, ())
    if not isinstance(instruction, Region):
        return most
    is_scan = kind_of(instruction.eqn) == "scan"
    num_shared = len(instruction.eqn.invars)
    for body in instruction.bodies:
        num_whole = (
            sum(s == o for (_, s), o in zip(body.inputs, instruction.operands, strict=False)) if is_scan else num_shared
        )
        # A scan's constants and carries are the operands themselves; its scanned inputs arrive as slices of their own.
        shared = frozenset(body.inputs[:num_whole])
        most = max(most, *_peaks(body, mesh, stored, frozenset(), 1, shared), key=lambda peak: peak.bytes)
    return most
