"""Bytes alive on one device at each moment of the sharded program.

In:     `Body`, the mesh, which values are stored at all, which inputs are donated.
Out:    `Liveness`: bytes of arguments and results, the peak, when it is, and who is alive then.
Method: a copy lives from the instruction that makes it to its last reader. Inputs live throughout unless donated, then
        to their last reader. A loop's body adds its own peak; its stacked outputs live from before the loop. Values
        that kernels make again take no memory of their own (`held.py`): what they are made of lives until it is read there.
        Of a stage of a pipeline some values are not there, and some are there for several microbatches (`Waiting`). What
        lies in the host's memory lives as long, under another name behind a barrier too (`host_peak_bytes`). What every
        sharding needs, whatever the order, is another question: `floor.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple

from autopar._jax import Var, on_host
from autopar.intra_op.sharded import (
    Body,
    Compute,
    Copy,
    Fused,
    Instruction,
    Move,
    Region,
    copies_made,
    local_bytes,
    share_bytes,
)
from autopar.intra_op.versions import Versions, find_versions
from autopar.intra_op.workspace import workspace_at
from autopar.ir.region import kind_of
from autopar.mesh import LogicalMesh
from autopar.tuning import TUNING


@dataclass(frozen=True, slots=True)
class Waiting:
    """How what a stage of a pipeline holds differs from what its program does, which is of one microbatch at a time.

    Attributes:
        elsewhere: Values that take no memory here, but in loops.
        in_flight: Microbatches that are between their forward and their backward pass at once.
        kept: Values that each of these holds.
    """

    elsewhere: AbstractSet[Var] = frozenset()
    in_flight: int = 1
    kept: AbstractSet[Var] = frozenset()


ONE_PROGRAM = Waiting()
"""Of a program that is no stage's."""


class Alive(NamedTuple):
    """A copy that is alive at some moment.

    Attributes:
        copy: The value and its sharding.
        num_bytes: On one device, `times` times.
        times: How many there are, of as many microbatches; what waits in float32 counts as two of 16 bits.
        body: Where it is: the program, or the body of a loop or branch.
        position: The moment: index of an instruction there.
    """

    copy: Copy
    num_bytes: int
    times: int
    body: Body
    position: int


@dataclass(frozen=True, slots=True, eq=False)
class Liveness:
    """Memory of one device, in bytes.

    Attributes:
        peak_bytes: Most bytes alive at once, arguments included.
        moment: Index of the instruction at the peak; -1: the beginning.
        alive: Copies alive at the peak, outermost body first; inner copies weighted once.
        packed: Moves that are being sent as one at the peak, packed into an array of their own.
        at: The innermost instruction at the peak; None: the beginning.
        argument_bytes: All program inputs; of the body of a loop or branch, 0.
        curve: Bytes alive at each instruction of the program, those inside it at their most.
    """

    peak_bytes: int
    moment: int
    alive: tuple[Alive, ...] = ()
    packed: tuple[Move, ...] = ()
    at: Instruction | None = None
    argument_bytes: int = 0
    curve: Sequence[int] = ()


_EMPTY = Liveness(0, 0)


def measure_liveness(
    body: Body,
    mesh: LogicalMesh,
    stored: Mapping[Var, int],
    donated: Sequence[bool] = (),
    in_place: AbstractSet[Copy] = frozenset(),
) -> Liveness:
    """Memory of a sharded program at its fullest moment.

    Args:
        body: The program.
        mesh: Its mesh.
        stored: Values that take memory, and how many times their bytes (`held.py`).
        donated: For each input, whether its memory may be reused after its last reader.
        in_place: Results that are written over inputs.
    """
    return fullest_moments(body, mesh, stored, donated, in_place=in_place)[0]


def fullest_moments(
    body: Body,
    mesh: LogicalMesh,
    stored: Mapping[Var, int],
    donated: Sequence[bool] = (),
    count: int = 1,
    waiting: Waiting = ONE_PROGRAM,
    in_place: AbstractSet[Copy] = frozenset(),
    over: float = 0.0,
) -> tuple[Liveness, ...]:
    """Memory of a sharded program at up to `count` moments, each the fullest of its part of the program, fullest first.

    A moment's part ends where memory has fallen by a hundredth. Those behind the first have more than `over` bytes.
    `waiting`: of a stage of a pipeline. The other arguments as of `measure_liveness`.
    """
    arguments = sum(local_bytes(var, sharding, mesh) for var, sharding in body.inputs)
    curve: list[int] = []
    pinned = _pinned(body, donated)
    given = waiting == ONE_PROGRAM  # the tasks of a stage do not hand on what they have turned
    peaks = _peaks(body, mesh, stored, pinned, count, curve, waiting=waiting, in_place=in_place, over=over, given=given)
    return tuple(dataclasses.replace(peak, argument_bytes=arguments, curve=curve) for peak in peaks)


def host_peak_bytes(body: Body, mesh: LogicalMesh) -> int:
    """Most bytes of one device that a program has in its host's memory at once, arguments and results left out.

    A row that a loop's body makes or reads is a part of the stack outside.
    """
    made_here = (var for instruction in body.instructions for var, _ in copies_made(instruction))
    if not any(on_host(var.aval) for var in made_here):
        return max((host_peak_bytes(inner, mesh) for inner in _inner_bodies(body)), default=0)
    made, results = find_versions(body, frozenset(), None), set(body.outputs)
    size = [
        share_bytes(*copy, mesh)
        if made.takes_memory(k) and made.starts[k] >= 0 and on_host(copy[0].aval) and copy not in results
        else 0
        for k, copy in enumerate(made.copies)
    ]
    total = most = 0
    changes = made.changes(size, len(body.instructions))[1:]
    for instruction, (born, freed) in zip(body.instructions, changes, strict=True):
        inner = instruction.bodies if isinstance(instruction, Region) else ()
        most = max(most, total + born + max((host_peak_bytes(each, mesh) for each in inner), default=0))
        total += born + freed
    return most


def _inner_bodies(body: Body) -> Iterator[Body]:
    for instruction in body.instructions:
        if isinstance(instruction, Region):
            yield from instruction.bodies


def _pinned(body: Body, donated: Sequence[bool]) -> set[Copy]:
    """Inputs that stay to the end."""
    return {copy for copy, freed in zip(body.inputs, donated or [False] * len(body.inputs), strict=True) if not freed}


def _peaks(
    body: Body,
    mesh: LogicalMesh,
    stored: Mapping[Var, int],
    pinned: AbstractSet[Copy],
    count: int,
    curve: list[int],
    free: AbstractSet[Copy] = frozenset(),
    waiting: Waiting = ONE_PROGRAM,
    in_place: AbstractSet[Copy] = frozenset(),
    over: float = 0.0,
    given: bool = False,
) -> list[Liveness]:
    """The `count` fullest moments, each of a part of the body, fullest first.

    What is alive at each instruction is added to `curve`. Copies in `free` are counted by the caller, those `in_place` lie in
    inputs. Moments behind the first have more than `over` bytes. `given`: inputs lie as they were given.
    """
    made = find_versions(body, pinned, stored, given)
    times = _times(made, body, waiting)
    size = [0] * len(made.copies)
    known: dict[Any, int] = {}  # of equal types that are sharded alike
    for k, (copy, start) in enumerate(zip(made.copies, made.starts, strict=True)):
        elsewhere = copy[0] in waiting.elsewhere or copy in (in_place if start >= 0 else free)
        if made.takes_memory(k) and not elsewhere:
            same = copy[0].aval, copy[1]
            num_bytes = known.get(same)
            if num_bytes is None:
                num_bytes = known[same] = local_bytes(*copy, mesh)
            size[k] = times[k] * num_bytes
    changes = made.changes(size, len(body.instructions))
    total = sum(size[: len(body.inputs)])
    peaks: list[Liveness] = []
    most = Liveness(total, -1)
    total += changes[0][1]
    for position, instruction in enumerate(body.instructions):
        born, freed = changes[position + 1]
        total += born
        inner = _inner_peak(instruction, mesh, stored, waiting)
        curve.append(total + inner.peak_bytes)
        if total + inner.peak_bytes < TUNING.peak_fallen * most.peak_bytes:
            peaks.append(most)
            most = Liveness(0, position)
        if total + inner.peak_bytes > most.peak_bytes:
            most = Liveness(total + inner.peak_bytes, position, inner.alive, inner.packed, inner.at or instruction)
        total += freed
    # Who is alive is looked up in the end: most instructions of a step are fuller than all before them.
    first, *others = sorted((*peaks, most), key=lambda peak: -peak.peak_bytes)[:count]
    fullest = (first, *(peak for peak in others if peak.peak_bytes > over))
    return [dataclasses.replace(p, alive=(*_alive(made, body, p.moment, size, times), *p.alive)) for p in fullest]


def _times(made: Versions, body: Body, waiting: Waiting) -> list[int]:
    """How many there are of each copy: of one that waits for the backward pass, as many as microbatches are in flight."""
    found = list(made.widths)
    if waiting.in_flight > 1:
        made_at = [start for copy, start in zip(made.copies, made.starts, strict=True) if copy[0] in waiting.kept]
        made_at = [at for at in made_at if at >= 0 and isinstance(body.instructions[at], Compute | Region)]
        last = max(made_at, default=-1)  # from here on all that is kept is there
        for k, (copy, start, end) in enumerate(zip(made.copies, made.starts, made.ends, strict=True)):
            if copy[0] in waiting.kept and start <= last < end:
                found[k] = waiting.in_flight
    return found


def _alive(made: Versions, body: Body, moment: int, size: Sequence[int], times: Sequence[int]) -> Iterator[Alive]:
    """Copies that are alive at a moment: made by then, and read there or later; or made there."""
    for copy, num_bytes, number, start, end in zip(made.copies, size, times, made.starts, made.ends, strict=True):
        if num_bytes and start <= moment and (start == moment or end >= moment):
            yield Alive(copy, num_bytes, number, body, moment)


def packed_bytes(move: Move, mesh: LogicalMesh) -> int:
    """What sending a move together with others takes: it is packed into one array, and arrives as one."""
    num_bytes = local_bytes(move.var, move.source, mesh) + local_bytes(move.var, move.target, mesh)
    return num_bytes * move.dtype.itemsize // move.var.aval.dtype.itemsize


def _inner_peak(instruction: Instruction, mesh: LogicalMesh, stored: Mapping[Var, int], waiting: Waiting) -> Liveness:
    """What the bodies of a region need beyond its operands and results; branches take turns, so the largest counts."""
    if isinstance(instruction, Fused):
        num_bytes = sum(packed_bytes(move, mesh) for move in instruction.moves)
        return Liveness(num_bytes, 0, packed=instruction.moves)
    if isinstance(instruction, Compute):
        num_bytes = workspace_at(instruction, mesh)
        return Liveness(num_bytes, 0) if num_bytes else _EMPTY
    if not isinstance(instruction, Region):
        return _EMPTY
    most = _EMPTY
    is_scan = kind_of(instruction.eqn) == "scan"
    num_shared = len(instruction.eqn.invars)
    for body in instruction.bodies:
        num_whole = (
            sum(s == o for (_, s), o in zip(body.inputs, instruction.operands, strict=False)) if is_scan else num_shared
        )
        # A scan's constants and carries are the operands themselves; its scanned inputs arrive as slices of their own.
        shared = frozenset(body.inputs[:num_whole])
        within = dataclasses.replace(waiting, elsewhere=frozenset())
        inner = _peaks(body, mesh, stored, frozenset(), 1, [], shared, within)
        most = max(most, *inner, key=lambda peak: peak.peak_bytes)
    return most
