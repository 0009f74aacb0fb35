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

import numpy as np

from autopar._jax import Literal, Var, on_host
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
from autopar.intra_op.traffic import is_fused
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
    made, results = _versions(body, frozenset(), None), set(body.outputs)
    size = [
        share_bytes(*copy, mesh) if is_there and start >= 0 and on_host(copy[0].aval) and copy not in results else 0
        for copy, start, is_there in zip(made.copies, made.starts, made.takes_memory, strict=True)
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
    made = _versions(body, pinned, stored, given)
    times = made.times(body, waiting)
    size = [0] * len(made.copies)
    known: dict[Any, int] = {}  # of equal types that are sharded alike
    for k, (copy, start, is_there) in enumerate(zip(made.copies, made.starts, made.takes_memory, strict=True)):
        if is_there and copy[0] not in waiting.elsewhere and copy not in (in_place if start >= 0 else free):
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
    return [dataclasses.replace(p, alive=(*made.alive(body, p.moment, size, times), *p.alive)) for p in fullest]


@dataclass(frozen=True, slots=True, eq=False)
class _Versions:
    """The copies of a body in the order in which they are made, its inputs first; one that is recomputed is another.

    Attributes:
        copies: Each.
        starts: The instruction that makes it; -1: it is an input.
        ends: The last that reads it, or what is made of it there; -1: none, the number of instructions: it stays.
        takes_memory: Whether it does, or is recomputed by each that reads it.
        widths: How many times the bytes of its type.
    """

    copies: list[Copy]
    starts: list[int]
    ends: list[int]
    takes_memory: list[bool]
    widths: list[int]

    def changes(self, size: Sequence[int], count: int) -> list[tuple[int, int]]:
        """Of the beginning and then each of so many instructions, the bytes that it adds, and those that are free behind it
        (less than nothing)."""
        born, freed = [0] * (count + 1), [0] * (count + 2)
        for num_bytes, start, end in zip(size, self.starts, self.ends, strict=True):
            born[start + 1] += num_bytes
            freed[(end if end >= 0 else start) + 1] -= num_bytes
        return list(zip(born, freed, strict=False))

    def times(self, body: Body, waiting: Waiting) -> list[int]:
        """How many there are of each copy: of one that waits for the backward pass, as many as microbatches are in flight."""
        found = list(self.widths)
        if waiting.in_flight > 1:
            made_at = [start for copy, start in zip(self.copies, self.starts, strict=True) if copy[0] in waiting.kept]
            made_at = [at for at in made_at if at >= 0 and isinstance(body.instructions[at], Compute | Region)]
            last = max(made_at, default=-1)  # from here on all that is kept is there
            for k, (copy, start, end) in enumerate(zip(self.copies, self.starts, self.ends, strict=True)):
                if copy[0] in waiting.kept and start <= last < end:
                    found[k] = waiting.in_flight
        return found

    def alive(self, body: Body, moment: int, size: Sequence[int], times: Sequence[int]) -> Iterator[Alive]:
        """Copies that are alive at a moment: made by then, and read there or later; or made there."""
        for copy, num_bytes, number, start, end in zip(self.copies, size, times, self.starts, self.ends, strict=True):
            if num_bytes and start <= moment and (start == moment or end >= moment):
                yield Alive(copy, num_bytes, number, body, moment)


def _versions(
    body: Body, pinned: AbstractSet[Copy], stored: Mapping[Var, int] | None, given: bool = False
) -> _Versions:
    """When each copy is made and read last; who reads what takes no memory reads what that is made of.

    With `given` inputs lie as they were given: one that is read turned is there twice from then on. What is scattered into
    zeros of the shape of a value that was cut off at zero is there from then on: compilers make both zeros at once. What is
    scattered into zeros that its reader adds to something is only then no array of its own when the reader takes it in the
    sharding in which it was made. `stored` None: all take memory but the results of barriers, which are the operands.
    """
    count = len(body.instructions)
    copies, starts = list(body.inputs), [-1] * len(body.inputs)
    ends = [count if copy in pinned else -1 for copy in body.inputs]
    current = {copy: k for k, copy in enumerate(copies)}
    made_of: list[tuple[int, ...]] = [(k,) for k in range(len(copies))]
    results = {(atom, sharding) for atom, sharding in body.outputs if not isinstance(atom, Literal)}
    moved = {copy for i in body.instructions if isinstance(i, Move | Fused) for copy in i.reads}
    turned: dict[int, int] = {}
    for position, instruction in enumerate(body.instructions):
        read_here = instruction.reads
        if len(read_here) == 1:
            read = made_of[current[read_here[0]]]
        else:
            read = tuple(dict.fromkeys([number for copy in read_here for number in made_of[current[copy]]]))
        computes = isinstance(instruction, Compute)
        turns = isinstance(instruction, Compute) and instruction.rule.turned
        for number in _turned_inputs(instruction, current, starts) if given and turns else ():
            if number not in turned:
                turned[number] = len(copies)
                copies.append(copies[number])
                made_of.append((turned[number],))
                starts.append(position)
                ends.append(-1)
        for number in read:
            if ends[number] < position:
                ends[number] = position
            if number in turned:
                ends[turned[number]] = position
        passed = _passed_on(instruction) if stored is None else {}
        for copy in instruction.makes:
            is_there = stored is None or not computes or copy[0] in stored or copy in results
            if not is_there and copy in moved and isinstance(instruction, Compute):
                is_there = not is_fused(instruction)
            own = (len(copies),) if is_there else read
            made_of.append(made_of[current[passed[copy]]] if copy in passed else own)
            current[copy] = len(copies)
            copies.append(copy)
            starts.append(_zeros_at(instruction, body, current, starts, position) if given else position)
            ends.append(-1)
    last_read = list(ends)
    for result in dict.fromkeys((a, s) for a, s in body.outputs if not isinstance(a, Literal)):
        ends[current[result]] = count
    widths = [stored.get(var, 1) for var, _ in copies] if stored else [1] * len(copies)
    for k in [k for k, width in enumerate(widths) if width > 1]:
        if copies[k] in results and last_read[k] > starts[k] >= 0:  # until then also as readers here take it
            made_of.append((len(copies),))
            copies.append(copies[k])
            starts.append(starts[k])
            ends.append(last_read[k])
            widths.append(widths[k] if copies[k][0].aval.dtype.itemsize > 1 else 1)
        if starts[k] < 0 or copies[k] in moved or copies[k] in results:  # those are of the type that they have
            widths[k] = 1
    return _Versions(copies, starts, ends, [number in made for number, made in enumerate(made_of)], widths)


def _turned_inputs(instruction: Instruction, current: Mapping[Copy, int], starts: Sequence[int]) -> list[int]:
    """The inputs that an instruction reads with their dims in another order."""
    if not isinstance(instruction, Compute) or not instruction.rule.turned:
        return []
    read = [(instruction.eqn.invars[k], instruction.strategy.operands[k]) for k in instruction.rule.turned]
    return [current[v, s] for v, s in read if not isinstance(v, Literal) and starts[current[v, s]] < 0]


def _zeros_at(
    instruction: Instruction, body: Body, current: Mapping[Copy, int], starts: Sequence[int], position: int
) -> int:
    """Where the zeros are made that the result of the instruction at a position begins as: there, or earlier."""
    if not isinstance(instruction, Compute) or instruction.rule.zeros_like is None:
        return position
    k = instruction.rule.zeros_like
    start = starts[current[instruction.eqn.invars[k], instruction.strategy.operands[k]]]
    maker = body.instructions[start] if start >= 0 else None
    constants = [a.val for a in maker.eqn.invars if isinstance(a, Literal)] if isinstance(maker, Compute) else []
    return start if any(not np.any(constant) for constant in constants) else position


def _passed_on(instruction: Instruction) -> dict[Copy, Copy]:
    """Of the results of a barrier, the operands that they are."""
    if not isinstance(instruction, Region) or kind_of(instruction.eqn) != "barrier":
        return {}
    given = zip(instruction.eqn.invars, instruction.operands, strict=True)
    pairs = zip(copies_made(instruction), given, strict=True)
    return {result: (atom, sharding) for result, (atom, sharding) in pairs if not isinstance(atom, Literal)}


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
