"""The copies that a sharded program makes: when each is made, when it is read last, and whether it takes memory.

In:     `Body`, its inputs that stay to the end, which values are stored at all.
Out:    `Versions`.
Method: one walk. Who reads what takes no memory reads what that is made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np

from autopar._jax import Literal, Var
from autopar.intra_op.sharded import Body, Compute, Copy, Fused, Instruction, Move, Region
from autopar.intra_op.traffic import is_fused
from autopar.ir.region import kind_of


@dataclass(frozen=True, slots=True, eq=False)
class Versions:
    """The copies of a body in the order in which they are made, its inputs first; one that is recomputed is another.

    Attributes:
        copies: Each.
        starts: The instruction that makes it; -1: it is an input.
        ends: The last that reads it, or what is made of it there; -1: none, the number of instructions: it stays.
        made_of: What whoever reads it reads: itself, or, if it takes no memory, what it is made of.
        widths: How many times the bytes of its type.
    """

    copies: list[Copy] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    made_of: list[Sequence[int]] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)

    def add(self, copy: Copy, start: int, end: int = -1, made_of: Sequence[int] | None = None) -> int:
        """One more, and its number."""
        number = len(self.copies)
        self.copies.append(copy)
        self.starts.append(start)
        self.ends.append(end)
        self.made_of.append((number,) if made_of is None else made_of)
        return number

    def takes_memory(self, number: int) -> bool:
        """Whether a copy does, or is recomputed by each that reads it."""
        return number in self.made_of[number]

    def changes(self, size: Sequence[int], count: int) -> list[tuple[int, int]]:
        """Of the beginning and then each of so many instructions, the bytes that it adds, and those that are free behind it
        (less than nothing)."""
        born, freed = [0] * (count + 1), [0] * (count + 2)
        for num_bytes, start, end in zip(size, self.starts, self.ends, strict=True):
            born[start + 1] += num_bytes
            freed[(end if end >= 0 else start) + 1] -= num_bytes
        return list(zip(born, freed, strict=False))


def find_versions(
    body: Body, pinned: AbstractSet[Copy], stored: Mapping[Var, int] | None, given: bool = False
) -> Versions:
    """When each copy is made and read last.

    With `given` inputs lie as they were given: one that is read turned is there twice from then on. What is scattered into
    zeros of the shape of a value that was cut off at zero is there from then on: compilers make both zeros at once. What is
    scattered into zeros that its reader adds to something is only then no array of its own when the reader takes it in the
    sharding in which it was made. `stored` None: all take memory but the results of barriers, which are the operands.
    """
    walk = _Walk(body, stored, given)
    for copy in body.inputs:
        walk.current[copy] = walk.found.add(copy, -1, len(body.instructions) if copy in pinned else -1)
    for position, instruction in enumerate(body.instructions):
        behind = walk.behind(instruction)
        walk.reads(instruction, position, behind)
        walk.makes(instruction, position, behind)
    walk.finish()
    return walk.found


class _Walk:
    """What is known of a body so far.

    Attributes:
        current: The number of each copy that is there.
        results: Copies that leave the body.
        moved: Those that are sent in another sharding: they must be there as arrays.
        turned: Of inputs that are read with their dims in another order, the number of what they are then.
    """

    def __init__(self, body: Body, stored: Mapping[Var, int] | None, given: bool):
        self.body, self.stored, self.given = body, stored, given
        self.found = Versions()
        self.current: dict[Copy, int] = {}
        self.results = dict.fromkeys((atom, s) for atom, s in body.outputs if not isinstance(atom, Literal))
        self.moved = {copy for i in body.instructions if isinstance(i, Move | Fused) for copy in i.reads}
        self.turned: dict[int, int] = {}

    def behind(self, instruction: Instruction) -> Sequence[int]:
        """What an instruction reads, or what that is made of."""
        made_of, read = self.found.made_of, instruction.reads
        if len(read) == 1:
            return made_of[self.current[read[0]]]
        return tuple(dict.fromkeys([number for copy in read for number in made_of[self.current[copy]]]))

    def reads(self, instruction: Instruction, position: int, behind: Sequence[int]) -> None:
        """What an instruction reads lives until then, and so does an input that it turns."""
        ends, turned = self.found.ends, self.turned
        for number in self.turned_by(instruction) if self.given else ():
            if number not in turned:
                turned[number] = self.found.add(self.found.copies[number], position)
        for number in behind:
            if ends[number] < position:
                ends[number] = position
            if number in turned:
                ends[turned[number]] = position

    def turned_by(self, instruction: Instruction) -> list[int]:
        """The inputs that an instruction reads with their dims in another order."""
        if not isinstance(instruction, Compute) or not instruction.rule.turned:
            return []
        read = [(instruction.eqn.invars[k], instruction.strategy.operands[k]) for k in instruction.rule.turned]
        numbers = [self.current[atom, sharding] for atom, sharding in read if not isinstance(atom, Literal)]
        return [number for number in numbers if self.found.starts[number] < 0]

    def makes(self, instruction: Instruction, position: int, behind: Sequence[int]) -> None:
        """What an instruction makes is there from then on, or is recomputed where it is read."""
        passed = _passed_on(instruction) if self.stored is None else {}
        start = self.zeros_at(instruction, position) if self.given else position
        for copy in instruction.makes:
            made_of = behind if self.is_recomputed(instruction, copy) else None
            if copy in passed:
                made_of = self.found.made_of[self.current[passed[copy]]]
            self.current[copy] = self.found.add(copy, start, made_of=made_of)

    def is_recomputed(self, instruction: Instruction, copy: Copy) -> bool:
        """Whether what an instruction makes takes no memory: whoever reads it makes it again."""
        if self.stored is None or not isinstance(instruction, Compute) or copy[0] in self.stored:
            return False
        return copy not in self.results and (copy not in self.moved or is_fused(instruction))

    def zeros_at(self, instruction: Instruction, position: int) -> int:
        """Where the zeros are made that the result of the instruction at a position begins as: there, or earlier."""
        if not isinstance(instruction, Compute) or instruction.rule.zeros_like is None:
            return position
        k = instruction.rule.zeros_like
        start = self.found.starts[self.current[instruction.eqn.invars[k], instruction.strategy.operands[k]]]
        maker = self.body.instructions[start] if start >= 0 else None
        constants = [a.val for a in maker.eqn.invars if isinstance(a, Literal)] if isinstance(maker, Compute) else []
        return start if any(not np.any(constant) for constant in constants) else position

    def finish(self) -> None:
        """Results stay; what is wider until it is read is so once more beside a result in the type that it leaves in."""
        found, stored, results = self.found, self.stored or {}, self.results
        last_read = list(found.ends)
        for result in results:
            found.ends[self.current[result]] = len(self.body.instructions)
        widths = found.widths
        widths += [stored.get(var, 1) for var, _ in found.copies]
        for k in [k for k, width in enumerate(widths) if width > 1]:
            copy, start, width = found.copies[k], found.starts[k], widths[k]
            if copy in results and last_read[k] > start >= 0:  # until then also as readers here take it
                found.add(copy, start, last_read[k])
                widths.append(width if copy[0].aval.dtype.itemsize > 1 else 1)
            if start < 0 or copy in self.moved or copy in results:  # those are of the type that they have
                widths[k] = 1


def _passed_on(instruction: Instruction) -> dict[Copy, Copy]:
    """Of the results of a barrier, the operands that they are."""
    if not isinstance(instruction, Region) or kind_of(instruction.eqn) != "barrier":
        return {}
    given = zip(instruction.eqn.invars, instruction.operands, strict=True)
    pairs = zip(instruction.makes, given, strict=True)
    return {result: (atom, sharding) for result, (atom, sharding) in pairs if not isinstance(atom, Literal)}
