"""Computes the bytes alive on one device at each moment of a sharded program.

In:     `Body`, the mesh, which values are held, which inputs are donated.
Out:    `Liveness`: the peak, its moment, and the copies alive then.
Method: the live range of a copy extends from the instruction that makes it to its last reader. Inputs live throughout;
        donated ones until their last reader, or until the result is made that overwrites them: in between XLA has little else
        there, since it takes slices of an argument where they are read. A loop's body adds its own peak; its stacks live from
        before the loop. Values that are not held (`held.py`) take no memory, but extend the live ranges of what they are
        computed from. Gradients stay until their sums over devices are certainly made (`unsent.py`). In a stage of a pipeline,
        some values are elsewhere, and some exist once per microbatch in flight (`Waiting`). Values in host memory are counted
        likewise, also under another name after a barrier (`host_peak_bytes`). A bound over all shardings and orders is in
        `floor.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple

from autopar._jax import Var, on_host
from autopar.grouping import grouped
from autopar.intra_op.sharded import Body, Compute, Copy, Fused, Instruction, Move, Region, local_bytes, share_bytes
from autopar.intra_op.sums import sums_in_place
from autopar.intra_op.unsent import unsent_copies
from autopar.intra_op.versions import Versions, find_versions
from autopar.intra_op.workspace import workspace_at
from autopar.ir.region import kind_of
from autopar.mesh import LogicalMesh
from autopar.tuning import TUNING


@dataclass(frozen=True, slots=True)
class Waiting:
    """How the memory of a pipeline stage differs from that of its joint program, which runs one microbatch at a time.

    Attributes:
        elsewhere: Values that take memory in loop bodies only.
        in_flight: Number of microbatches in flight: between their forward and their backward pass.
        kept: Values that each microbatch in flight holds.
    """

    elsewhere: AbstractSet[Var] = frozenset()
    in_flight: int = 1
    kept: AbstractSet[Var] = frozenset()


ONE_PROGRAM = Waiting()
"""For a program that is not a stage's."""


class Alive(NamedTuple):
    """A copy that is alive at some moment.

    Attributes:
        copy: The value and its sharding.
        num_bytes: Bytes on one device, all `times` instances together.
        times: Number of instances: of microbatches in flight; twice that for 16 bits held in float32.
        body: The program, or the body of a loop or branch, that it is in.
        position: The moment: index of an instruction in that body.
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
        moment: Index of the instruction at the peak; -1: the start.
        alive: Copies alive at the peak, outermost body first.
        packed: Fused moves at the peak, packed into an array of their own.
        at: The innermost instruction at the peak; None: the start.
        argument_bytes: Bytes of all program inputs; for the body of a loop or branch, 0.
        curve: Bytes alive at each instruction of the program, including the peak inside it.
        versions: The versions of the body's copies, whatever they take.
    """

    peak_bytes: int
    moment: int
    alive: tuple[Alive, ...] = ()
    packed: tuple[Move, ...] = ()
    at: Instruction | None = None
    argument_bytes: int = 0
    curve: Sequence[int] = ()
    versions: Versions | None = None


_EMPTY = Liveness(0, 0)


def measure_liveness(
    body: Body,
    mesh: LogicalMesh,
    stored: Mapping[Var, int],
    donated: Sequence[bool] = (),
    in_place: AbstractSet[Copy] = frozenset(),
) -> Liveness:
    """Memory of a sharded program at its peak.

    Args:
        body: The program.
        mesh: Its mesh.
        stored: Held values, with the factor on their bytes (`held.py`).
        donated: Per input, whether its memory may be reused after its last reader.
        in_place: Results that overwrite inputs.
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
    """Memory of a sharded program at up to `count` local peaks, the highest first.

    A local peak ends where memory has fallen by a hundredth. All but the highest have more than `over` bytes.
    `waiting`: for a pipeline stage. Other arguments as in `measure_liveness`.
    """
    arguments = sum(local_bytes(var, sharding, mesh) for var, sharding in body.inputs)
    curve: list[int] = []
    pinned = _pinned(body, donated)
    given = waiting == ONE_PROGRAM  # the tasks of a stage do not pass on transposed inputs
    made = _versions(body, mesh, stored, pinned, given)
    made_at = dict(zip(made.copies, made.starts, strict=True))
    for result, k in overwriting(body, donated).items():
        made.ends[k] = max(made.ends[k], made_at[result] - 1)
    peaks = _peaks(body, mesh, stored, pinned, count, curve, frozenset(), waiting, in_place, over, given, made=made)
    return tuple(dataclasses.replace(peak, argument_bytes=arguments, curve=curve) for peak in peaks)


def host_peak_bytes(body: Body, mesh: LogicalMesh) -> int:
    """Peak bytes that one device's values take in host memory, without arguments and results of the program.

    A row that a loop's body makes or reads is part of the stack outside.
    """
    made_here = (var for instruction in body.instructions for var, _ in instruction.makes)
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
    """Inputs that live to the end."""
    return {copy for copy, freed in zip(body.inputs, donated or [False] * len(body.inputs), strict=True) if not freed}


def overwriting(body: Body, donated: Sequence[bool]) -> dict[Copy, int]:
    """Results of a program that overwrite its donated inputs, with the number of the input: of their type and sharded alike."""
    free = grouped(
        (_type_of(copy), k) for k, (copy, is_free) in enumerate(zip(body.inputs, donated, strict=False)) if is_free
    )
    waiting = {kind: iter(numbers) for kind, numbers in free.items()}
    found: dict[Copy, int] = {}
    for copy in body.results:
        number = next(waiting.get(_type_of(copy), iter(())), None)
        if number is not None:
            found[copy] = number
    return found


def _type_of(copy: Copy) -> Hashable:
    aval = copy[0].aval
    return aval.shape, aval.dtype, on_host(aval), copy[1]


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
    rows: AbstractSet[Copy] = frozenset(),
    made: Versions | None = None,
) -> list[Liveness]:
    """Up to `count` local peaks of a body, the highest first.

    Bytes alive at each instruction are appended to `curve`. All peaks but the highest have more than `over` bytes. Other
    arguments as in `sized_versions`.
    """
    made, size, times = sized_versions(body, mesh, stored, pinned, free, waiting, in_place, given, rows, made)
    changes = made.changes(size, len(body.instructions))
    total = sum(size[: len(body.inputs)])
    peaks: list[Liveness] = []
    most = Liveness(total, -1)
    total += changes[0][1]
    for position, instruction in enumerate(body.instructions):
        born, freed = changes[position + 1]
        total += born
        inner = _inner_peak(instruction, mesh, stored, waiting)
        if (copy := made.turned.get(position)) is not None and local_bytes(*copy, mesh) > inner.peak_bytes:
            twice = Alive(copy, local_bytes(*copy, mesh), 1, body, position)
            inner = Liveness(twice.num_bytes, 0, (twice,))
        curve.append(total + inner.peak_bytes)
        if total + inner.peak_bytes < TUNING.peak_fallen * most.peak_bytes:
            peaks.append(most)
            most = Liveness(0, position)
        if total + inner.peak_bytes > most.peak_bytes:
            most = Liveness(total + inner.peak_bytes, position, inner.alive, inner.packed, inner.at or instruction)
        total += freed
    # Live copies are looked up at the end only: most instructions of a step are fuller than all before them.
    first, *others = sorted((*peaks, most), key=lambda peak: -peak.peak_bytes)[:count]
    fullest = (first, *(peak for peak in others if peak.peak_bytes > over))
    return [
        dataclasses.replace(p, alive=(*_alive(made, body, p.moment, size, times), *p.alive), versions=made)
        for p in fullest
    ]


def sized_versions(
    body: Body,
    mesh: LogicalMesh,
    stored: Mapping[Var, int],
    pinned: AbstractSet[Copy],
    free: AbstractSet[Copy] = frozenset(),
    waiting: Waiting = ONE_PROGRAM,
    in_place: AbstractSet[Copy] = frozenset(),
    given: bool = False,
    rows: AbstractSet[Copy] = frozenset(),
    made: Versions | None = None,
) -> tuple[Versions, list[int], list[int]]:
    """The versions of a body's copies, and of each its bytes on one device and its number of instances.

    Copies in `free` are counted by the caller, those `in_place` overwrite inputs. `given`: inputs are in the layout given.
    `rows`: of stacks that a loop reads. `made`: the versions, if they are known.
    """
    if made is None:
        made = _versions(body, mesh, stored, pinned, given, rows)
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
    return made, size, times


def _versions(
    body: Body,
    mesh: LogicalMesh,
    stored: Mapping[Var, int],
    pinned: AbstractSet[Copy],
    given: bool,
    rows: AbstractSet[Copy] = frozenset(),
) -> Versions:
    made = find_versions(body, pinned, stored, given, rows)
    made.extend(unsent_copies(body, lambda copy: local_bytes(*copy, mesh)))
    return made


def _times(made: Versions, body: Body, waiting: Waiting) -> list[int]:
    """Instances of each copy: for residuals that wait for the backward pass, one per microbatch in flight."""
    found = list(made.widths)
    if waiting.in_flight > 1:
        made_at = [start for copy, start in zip(made.copies, made.starts, strict=True) if copy[0] in waiting.kept]
        made_at = [at for at in made_at if at >= 0 and isinstance(body.instructions[at], Compute | Region)]
        last = max(made_at, default=-1)  # from here on all residuals exist
        for k, (copy, start, end) in enumerate(zip(made.copies, made.starts, made.ends, strict=True)):
            if copy[0] in waiting.kept and start <= last < end:
                found[k] = waiting.in_flight
    return found


def _alive(made: Versions, body: Body, moment: int, size: Sequence[int], times: Sequence[int]) -> Iterator[Alive]:
    """Copies alive at a moment: made by then and read then or later, or made then."""
    for copy, num_bytes, number, start, end in zip(made.copies, size, times, made.starts, made.ends, strict=True):
        if num_bytes and start <= moment and (start == moment or end >= moment):
            yield Alive(copy, num_bytes, number, body, moment)


def packed_bytes(move: Move, mesh: LogicalMesh) -> int:
    """Bytes that a fused move takes for packing: its shares of the array sent and of the array received."""
    num_bytes = local_bytes(move.var, move.source, mesh) + local_bytes(move.var, move.target, mesh)
    return num_bytes * move.dtype.itemsize // move.var.aval.dtype.itemsize


def workspace_of(instruction: Instruction, mesh: LogicalMesh) -> int:
    """Bytes that an instruction without bodies needs beyond its operands and results: for packing, or its workspace."""
    if isinstance(instruction, Fused):
        return sum(packed_bytes(move, mesh) for move in instruction.moves)
    return workspace_at(instruction, mesh) if isinstance(instruction, Compute) else 0


def shared_inputs(region: Region, body: Body) -> frozenset[Copy]:
    """The inputs of a region's body that are its operands themselves.

    A scan's constants and carries are; its scanned inputs arrive as slices of their own.
    """
    count = len(region.eqn.invars)
    if kind_of(region.eqn) == "scan":
        count = sum(s == o for (_, s), o in zip(body.inputs, region.operands, strict=False))
    return frozenset(body.inputs[:count])


def rows_of_stacks(region: Region, body: Body) -> frozenset[Copy]:
    """The inputs of a region's body that are rows of stacks in device memory."""
    return frozenset(copy for copy in set(body.inputs) - shared_inputs(region, body) if not on_host(copy[0].aval))


def new_sums(region: Region) -> frozenset[Copy]:
    """What a loop's body writes over what the trip before has left."""
    return frozenset(each.new for each in sums_in_place(region))


def _inner_peak(instruction: Instruction, mesh: LogicalMesh, stored: Mapping[Var, int], waiting: Waiting) -> Liveness:
    """What an instruction needs beyond its operands and results: packing, workspace, or the peak of its bodies."""
    num_bytes = workspace_of(instruction, mesh)
    if num_bytes:
        return Liveness(num_bytes, 0, packed=instruction.moves if isinstance(instruction, Fused) else ())
    if not isinstance(instruction, Region):
        return _EMPTY
    most = _EMPTY
    for body in instruction.bodies:
        shared = shared_inputs(instruction, body)
        within = dataclasses.replace(waiting, elsewhere=frozenset())
        rows, sums = rows_of_stacks(instruction, body), new_sums(instruction)
        inner = _peaks(body, mesh, stored, frozenset(), 1, [], shared, within, sums, rows=rows)
        most = max(most, *inner, key=lambda peak: peak.peak_bytes)
    return most
