"""Finds the live range of each copy of a sharded program, and whether it takes memory.

In:     `Body`, its inputs that live to the end, the held values.
Out:    `Versions`.
Method: one forward walk. A reader of a copy that takes no memory reads what the copy is computed from.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from autopar._jax import Literal, Var, on_host
from autopar.cost.steps import AllGather
from autopar.intra_op.held import read_from_memory
from autopar.intra_op.host_order import arrivals, copies_any_host, copies_host, fetched_first
from autopar.intra_op.sharded import Body, Compute, Copy, Fused, Instruction, Move, Region
from autopar.intra_op.sums import sums_in_place
from autopar.intra_op.traffic import is_fused
from autopar.ir.region import kind_of
from autopar.ir.work import num_bytes as whole_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Versions:
    """The versions of copies in a body, in order of definition, inputs first; a redefined copy is a new version.

    Attributes:
        copies: The copy of each version.
        starts: The instruction that makes it; -1: an input.
        ends: The last instruction that reads it, also through versions computed from it; -1: none; number of instructions:
            it lives to the end.
        made_of: The versions that its readers read: itself, or, if it takes no memory, those it is computed from.
        widths: Factor on the bytes of its type.
        turned: Instruction, a loop or one that makes a result -> the largest copy that is transposed there.
    """

    copies: list[Copy] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    made_of: list[Sequence[int]] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    turned: dict[int, Copy] = field(default_factory=dict)

    def add(self, copy: Copy, start: int, end: int = -1, made_of: Sequence[int] | None = None) -> int:
        """Add a version; returns its index."""
        number = len(self.copies)
        self.copies.append(copy)
        self.starts.append(start)
        self.ends.append(end)
        self.made_of.append((number,) if made_of is None else made_of)
        return number

    def takes_memory(self, number: int) -> bool:
        """Whether a version takes memory, or is recomputed by its readers."""
        return number in self.made_of[number]

    def extend(self, until: Iterable[tuple[Copy, int]]) -> None:
        """Let the last versions of copies, or what they are computed from, live until the instruction given."""
        number = {copy: k for k, copy in enumerate(self.copies)} if (until := list(until)) else {}
        for copy, end in until:
            for k in self.made_of[number[copy]]:
                self.ends[k] = max(end, self.ends[k])

    def changes(self, size: Sequence[int], count: int) -> list[tuple[int, int]]:
        """For the start, then for each of `count` instructions: bytes allocated, and bytes freed after it (negative)."""
        born, freed = [0] * (count + 1), [0] * (count + 2)
        for num_bytes, start, end in zip(size, self.starts, self.ends, strict=True):
            born[start + 1] += num_bytes
            freed[(end if end >= 0 else start) + 1] -= num_bytes
        return list(zip(born, freed, strict=False))


def find_versions(
    body: Body,
    pinned: AbstractSet[Copy],
    stored: Mapping[Var, int] | None,
    given: bool = False,
    rows: AbstractSet[Copy] = frozenset(),
) -> Versions:
    """Find the versions of a body.

    With `given`, inputs are in the layout given: one that is read transposed exists twice from then on; and what the first
    trip of the first loop fetches from host memory is there early, since compilers peel that trip off.
    What is gathered along an inner dim is transposed where a layout is given: results; and stacks, one after another, before a
    loop begins that reads their rows (`turned`).
    A scatter that its reader adds to a value is done in place only if the reader takes it in the sharding it was made in.
    Inputs among `rows` are rows of stacks, which elementwise work reads there: they take memory only between what reads them
    as arrays. What a trip gathers of them, the trip before has gathered already, and is there twice (`gathered_ahead`).
    `stored` None: all copies take memory except results of barriers, which are their operands.
    """
    walk = _Walk(body, stored, given, rows)
    for copy in body.inputs:
        end, made_of = len(body.instructions) if copy in pinned else -1, () if copy in rows else None
        walk.current[copy] = walk.found.add(copy, -1, end, made_of)
    late, begins_loops = arrivals(body, given) if walk.copies_host else {}, True
    for position, instruction in enumerate(body.instructions):
        if position in late:
            walk.arrive(late[position], position)
        if given and isinstance(instruction, Region) and kind_of(instruction.eqn) == "scan":
            is_first, begins_loops = begins_loops, False
            for copy, there in fetched_first(instruction) if is_first else ():
                walk.found.add(copy, max(0, walk.found.starts[walk.current[there]]), position)
        walk.turns(instruction, position)
        behind = walk.behind(instruction)
        walk.reads(instruction, position, behind)
        walk.makes(instruction, position, behind)
    for copy in gathered_ahead(body, rows) if rows else ():
        walk.found.add(copy, 0, len(body.instructions))
    walk.finish()
    return walk.found


class _Walk:
    """The state of the walk.

    Attributes:
        current: Present version of each copy.
        results: Copies that are results of the body.
        moved: Copies that are operands of moves: they must be arrays.
        turned: Input that is read transposed -> version of its transpose.
        sliced: Row that is read as an array -> its version.
        leaving: Value on its way to host memory -> the versions that are copied there.
        gathered: Copies that are gathered along an inner dim.
        copies_host: Whether any instruction copies to or from host memory.
    """

    def __init__(self, body: Body, stored: Mapping[Var, int] | None, given: bool, rows: AbstractSet[Copy]):
        self.body, self.stored, self.given, self.rows = body, stored, given, rows
        self.found = Versions()
        self.current: dict[Copy, int] = {}
        self.results = body.results
        self.moved = {copy for i in body.instructions if isinstance(i, Move | Fused) for copy in i.reads}
        self.turned: dict[int, int] = {}
        self.sliced: dict[Copy, int] = {}
        self.leaving: dict[Copy, Sequence[int]] = {}
        self.gathered: set[Copy] = set()
        self.copies_host = copies_any_host(body.instructions)

    def behind(self, instruction: Instruction) -> Sequence[int]:
        """The versions that an instruction reads, or that what it reads is computed from."""
        made_of, read = self.found.made_of, instruction.reads
        if len(read) == 1:
            return made_of[self.current[read[0]]]
        return tuple(dict.fromkeys([number for copy in read for number in made_of[self.current[copy]]]))

    def arrive(self, there: Iterable[Copy], position: int) -> None:
        """Extend the live ranges of what has certainly arrived in host memory by now."""
        for copy in there:
            for number in self.leaving.pop(copy, ()):
                self.found.ends[number] = max(position, self.found.ends[number])

    def reads(self, instruction: Instruction, position: int, behind: Sequence[int]) -> None:
        """Extend the live ranges of what an instruction reads, and of transposes of inputs."""
        ends, turned = self.found.ends, self.turned
        self.arrive(instruction.reads if self.leaving else (), position)
        for number in self.turned_by(instruction) if self.given else ():
            if number not in turned:
                turned[number] = self.found.add(self.found.copies[number], position)
        for copy in _as_arrays(instruction) if self.rows else ():
            if copy in self.rows:
                if copy not in self.sliced:
                    self.sliced[copy] = self.found.add(copy, position)
                ends[self.sliced[copy]] = position
        reused = self.reused_by(instruction)
        for number in behind:
            last = position - (number in reused)
            if ends[number] < last:
                ends[number] = last
            if number in turned:
                ends[turned[number]] = position

    def turns(self, instruction: Instruction, position: int) -> None:
        """Note what is gathered along an inner dim, and the largest of such stacks that a loop reads."""
        for move in instruction.moves if isinstance(instruction, Move | Fused) else ():
            if isinstance(move.step, AllGather) and math.prod(move.var.aval.shape[: move.step.dim]) > 1:
                self.gathered.update(move.makes)
                if self.given and isinstance(instruction, Move) and not self.results.keys().isdisjoint(move.makes):
                    self.found.turned[position] = move.makes[0]
        if self.gathered and isinstance(instruction, Region) and kind_of(instruction.eqn) == "scan":
            given, rows = zip(instruction.eqn.invars, instruction.operands, strict=True), instruction.bodies[0].inputs
            inside = [copy for copy, (row, _) in zip(given, rows, strict=True) if row.aval.ndim < copy[0].aval.ndim]
            if turned := [copy for copy in inside if copy in self.gathered]:
                self.found.turned[position] = max(turned, key=lambda copy: whole_bytes(copy[0]))

    def reused_by(self, instruction: Instruction) -> set[int]:
        """The versions whose memory the results of an instruction take if nothing reads them later: inputs first."""
        if isinstance(instruction, Region):
            begun = [self.current[each.begun] for each in sums_in_place(instruction)]
            return {k for k in begun if self.found.takes_memory(k) and self.found.ends[k] < len(self.body.instructions)}
        if not isinstance(instruction, Compute) or not instruction.rule.reused:
            return set()
        read = [(instruction.eqn.invars[k], instruction.strategy.operands[k]) for k in instruction.rule.reused]
        left = Counter([(var.aval.dtype, sharding) for var, sharding in instruction.makes])
        found: set[int] = set()
        for copy in sorted(read, key=lambda copy: self.found.starts[self.current[copy]]):
            behind, kind = self.found.made_of[self.current[copy]], (copy[0].aval.dtype, copy[1])
            if left[kind] and len(behind) == 1 and self.found.ends[behind[0]] < len(self.body.instructions):
                left[kind] -= 1
                found.add(behind[0])
        return found

    def turned_by(self, instruction: Instruction) -> list[int]:
        """The inputs that an instruction reads transposed."""
        if not isinstance(instruction, Compute) or not instruction.rule.transposed:
            return []
        read = [(instruction.eqn.invars[k], instruction.strategy.operands[k]) for k in instruction.rule.transposed]
        numbers = [self.current[atom, sharding] for atom, sharding in read if not isinstance(atom, Literal)]
        return [number for number in numbers if self.found.starts[number] < 0]

    def makes(self, instruction: Instruction, position: int, behind: Sequence[int]) -> None:
        """Add the versions that an instruction makes."""
        passed = _passed_on(instruction) if self.stored is None else {}
        if self.copies_host and copies_host(instruction) and not on_host(instruction.reads[0][0].aval):
            self.leaving.update(dict.fromkeys(instruction.makes, behind))
        for copy in instruction.makes:
            made_of = behind if self.is_recomputed(instruction, copy) else None
            if copy in passed:
                made_of = self.found.made_of[self.current[passed[copy]]]
            self.current[copy] = self.found.add(copy, position, made_of=made_of)

    def is_recomputed(self, instruction: Instruction, copy: Copy) -> bool:
        """Whether a result of an instruction takes no memory and is recomputed by its readers."""
        if self.stored is None or not isinstance(instruction, Compute) or copy[0] in self.stored:
            return False
        return copy not in self.results and (copy not in self.moved or is_fused(instruction))

    def finish(self) -> None:
        """Let results live to the end, and set widths: a wide result exists also once in its own type."""
        found, stored, results = self.found, self.stored or {}, self.results
        if self.given:
            self.arrive(results, len(self.body.instructions))
        last_read = list(found.ends)
        for result in results:
            found.ends[self.current[result]] = len(self.body.instructions)
        widths = found.widths
        widths += [stored.get(var, 1) for var, _ in found.copies]
        for k in [k for k, width in enumerate(widths) if width > 1]:
            copy, start, width = found.copies[k], found.starts[k], widths[k]
            if copy in results and last_read[k] > start >= 0:  # until its last reader, also in the wide type
                found.add(copy, start, last_read[k])
                widths.append(width if copy[0].aval.dtype.itemsize > 1 else 1)
            if start < 0 or copy in self.moved or copy in results:  # these are in their own type
                widths[k] = 1


def gathered_ahead(body: Body, rows: AbstractSet[Copy]) -> Iterator[Copy]:
    """What is gathered of rows of stacks, as they are or in another dtype or layout: compilers for GPUs gather it while the
    trip before computes, and copy it at the end of that (`collective_pipeliner.cc`)."""
    ready = set(rows)
    for instruction in body.instructions:
        if isinstance(instruction, Compute):
            if instruction.reads and is_fused(instruction) and ready.issuperset(instruction.reads):
                ready.update(instruction.makes)
        for move in instruction.moves if isinstance(instruction, Move | Fused) else ():
            if isinstance(move.step, AllGather) and move.earlier is None and ready.issuperset(move.reads):
                yield from move.makes


def _as_arrays(instruction: Instruction) -> Iterable[Copy]:
    """What an instruction reads as arrays."""
    if not isinstance(instruction, Compute):
        return instruction.reads
    read = set(read_from_memory(instruction))
    return [copy for copy in instruction.reads if copy[0] in read]


def _passed_on(instruction: Instruction) -> dict[Copy, Copy]:
    """Result -> operand of a barrier; {} for other instructions."""
    if not isinstance(instruction, Region) or kind_of(instruction.eqn) != "barrier":
        return {}
    given = zip(instruction.eqn.invars, instruction.operands, strict=True)
    pairs = zip(instruction.makes, given, strict=True)
    return {result: (atom, sharding) for result, (atom, sharding) in pairs if not isinstance(atom, Literal)}
