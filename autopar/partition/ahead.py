"""Makes loops, and recomputation, wait for work that compilers would leave for later, and keep all that it reads.

In:     a sharded body, the place in it of a loop, or of the barrier or gate before what is recomputed.
Out:    copies that are waited for there.
Method: a scheduler that hides latency runs first what others wait for. The gradient of a model's head is needed by the
        update alone, and may come behind the loop of the backward pass, which waits for the other product with the same
        logits: these then live through the loop. So a loop waits for what it does not need, if that reads something large
        which nobody needs afterwards, and makes less of it. What is recomputed, layer by layer, is like such a loop written
        out: without waiting for the gradients of one layer's weights, the activations of all layers would be there at once.
        A product that is only added to something is waited for when it is added, which is one kernel. And the backward pass
        begins with numbers in which no array has a part: they wait for the loss, for which the logits would be kept.
        What makes a large array waits, too, with the smallest that it reads: scores of attention are not made beside all
        that gradients of weights are still made of. And what a loop carries out waits for the stacks that another loop
        reads: compilers take the last trip off a loop that communicates, and would write its rows when that other one begins.
        What two loops read that is made of numbers alone is made twice: once for both, it would be kept between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from autopar._jax import Literal, on_host
from autopar.intra_op.sharded import (
    Body,
    Compute,
    Copy,
    Fused,
    Gate,
    Instruction,
    Move,
    Region,
    copies_made,
    copies_read,
)
from autopar.ir.gradient import is_backward
from autopar.ir.region import kind_of, region_of
from autopar.tuning import TUNING


def waits_at(instruction: Instruction) -> bool:
    """Whether an instruction is the first of what is recomputed: a barrier or a gate."""
    return isinstance(instruction, Gate) or (isinstance(instruction, Region) and kind_of(instruction.eqn) == "barrier")


def is_seed(compute: Compute) -> bool:
    """Whether an operation of the backward pass reads numbers alone, and not only zeros."""
    numbers = [atom.val for atom in compute.eqn.invars if isinstance(atom, Literal)]
    return not compute.reads and any(map(np.any, numbers)) and is_backward(compute.eqn)


class Ahead:
    """What is waited for in a body; `num_bytes` says how large copies are on one device."""

    def __init__(self, body: Body, num_bytes: Callable[[Copy], int]):
        self.body, self.num_bytes = body, num_bytes
        self.made_at = dict.fromkeys(body.inputs, -1)
        self.readers: dict[Copy, list[int]] = {}
        for position, instruction in enumerate(body.instructions):
            for copy in copies_read(instruction):
                self.readers.setdefault(copy, []).append(position)
            self.made_at.update(dict.fromkeys(copies_made(instruction), position))
        given = self._given()
        self.waits = [
            k for k, i in enumerate(body.instructions) if waits_at(i) and not given.issuperset(copies_read(i))
        ]
        self.stay = {*body.inputs, *((a, s) for a, s in body.outputs if not isinstance(a, Literal))}
        self.of_large = dict(self._of_large())

    def _given(self) -> set[Copy]:
        """What the body is given, also moved or in another form: a barrier for that alone waits for nothing."""
        given = set(self.body.inputs)
        for instruction in self.body.instructions:
            is_form = isinstance(instruction, Move | Fused) or (
                isinstance(instruction, Compute) and not instruction.rule.summed
            )
            if is_form and given.issuperset(copies_read(instruction)):
                given.update(copies_made(instruction))
        return given

    def of_loop(self, position: int) -> list[tuple[Copy, int]]:
        """Copies that the loop at this place waits for, and the bytes on one device that are free when each is there."""
        return self.done_before(position, 0, TUNING.late_bytes)

    def of_numbers(self, position: int) -> list[Copy]:
        """Large copies that the loop at this place reads and in which no array has a part, such as a mask for all rows."""
        made: set[Copy] = set()
        for instruction in self.body.instructions[:position]:
            if isinstance(instruction, Compute) and made.issuperset(copies_read(instruction)):
                made.update(copies_made(instruction))
        read = dict.fromkeys(copies_read(self.body.instructions[position]))
        return [copy for copy in read if copy in made and self.num_bytes(copy) >= TUNING.late_bytes]

    def behind_loop(self, position: int) -> list[Copy]:
        """Stacks with large rows that the scan at this place makes and another loop reads."""
        region = self.body.instructions[position]
        assert isinstance(region, Region)
        made, loop = copies_made(region), region_of(region.eqn)
        stacks = [copy for copy in made[len(loop.carries) :] if not on_host(copy[0].aval)]
        wide = [copy for copy in stacks if self.num_bytes(copy) >= TUNING.late_bytes * loop.trips]
        return [copy for copy in wide if any(map(self._is_loop, self.readers.get(copy, ())))]

    def _is_loop(self, position: int) -> bool:
        instruction = self.body.instructions[position]
        return isinstance(instruction, Region) and kind_of(instruction.eqn) in ("scan", "while")

    def of_again(self, position: int) -> tuple[list[Copy], list[Copy]]:
        """Copies that the recomputation beginning here reads and that are there before their time, and what they wait for.

        Those are what the body has made before; else of what it is given the layer's input, as large as the gradient of its
        result. That is what comes last, and is waited for.
        """
        instruction = self.body.instructions[position]
        if isinstance(instruction, Gate):
            latest, delayed = instruction.earlier, list(instruction.copies)
        else:
            read = [copy for copy in dict.fromkeys(copies_read(instruction)) if not on_host(copy[0].aval)]
            if position not in self.waits or all(self.made_at[copy] < 0 for copy in read):
                return [], []
            latest = max(read, key=lambda copy: self.made_at[copy])
            others = [copy for copy in read if copy != latest]
            alike = [copy for copy in others if copy[0].aval.shape == latest[0].aval.shape]
            delayed = [copy for copy in others if self.made_at[copy] >= 0] or alike or others
            delayed = [copy for copy in delayed if self.num_bytes(copy) >= TUNING.again_bytes]
        before = [k for k in self.waits if k < position]
        first = self.done_before(position, before[-1] if before else 0, TUNING.again_bytes) if delayed else []
        return delayed, [latest, *(copy for copy, _ in first)]

    def _of_large(self) -> Iterator[tuple[int, tuple[Copy, list[Copy]]]]:
        """Where one of the body's largest arrays is made, the small copy that is read there and what this waits for."""
        made = [self._made_bytes(instruction) for instruction in self.body.instructions]
        least = max(TUNING.late_bytes, TUNING.large_part * max(made, default=0))
        freeing: list[int] = []  # not waited for yet, and perhaps not needed either
        behind: set[int] = set()  # what only makes that wider, or adds it to a result
        for position, instruction in enumerate(self.body.instructions):
            if made[position] >= least and freeing and position not in behind:
                idle = list(self._idle(position, freeing[0]))
                still = frozenset(idle)
                freeing = [at for at in freeing if at in still]
                first = {at: freed for at, freed in self._freed(position, idle, TUNING.late_bytes) if at in freeing}
                smallest = min(copies_read(instruction), key=self.num_bytes, default=None)
                enough = TUNING.late_part * max(first.values(), default=0)
                if first and smallest is not None and self.num_bytes(smallest) <= enough:
                    freeing = [at for at in freeing if at not in first]
                    yield position, (smallest, [*self._results(position, first, idle)])
            if self._frees(position):
                freeing.append(position)
                line = [step for copy in copies_made(instruction) for step in self._line(copy)]
                is_sum = bool(line) and line[-1][1] in self.stay
                behind.update(at for at, _ in line if is_sum or self._is_cast(at))

    def _is_cast(self, position: int) -> bool:
        instruction = self.body.instructions[position]
        return isinstance(instruction, Compute) and instruction.eqn.primitive.name == "convert_element_type"

    def _frees(self, position: int) -> bool:
        """Whether an instruction reads something large that need not be kept for others, and makes much less of it."""
        instruction = self.body.instructions[position]
        if not isinstance(instruction, Compute | Region):
            return False
        freed = max((self.num_bytes(copy) for copy in copies_read(instruction) if copy not in self.stay), default=0)
        return freed >= TUNING.late_bytes and 2 * sum(map(self.num_bytes, copies_made(instruction))) < freed

    def _made_bytes(self, instruction: Instruction) -> int:
        """The largest array that an operation makes; what only repeats numbers is made by those who read it."""
        if not isinstance(instruction, Compute) or instruction.eqn.primitive.name == "broadcast_in_dim":
            return 0
        return max(map(self.num_bytes, copies_made(instruction)), default=0)

    def done_before(self, position: int, begin: int, least_bytes: int) -> list[tuple[Copy, int]]:
        """What stands from `begin` on, does not lead to this place, and reads what is large and nobody needs from there on."""
        idle = list(self._idle(position, begin))
        freed = dict(self._freed(position, idle, least_bytes))
        return list(dict.fromkeys(zip(self._results(position, freed, idle), freed.values(), strict=True)))

    def _freed(self, position: int, idle: Sequence[int], least_bytes: int) -> Iterator[tuple[int, int]]:
        """Of what stands idle before a place, what reads the last of something large and makes less of it, and how large."""
        for at in reversed(idle):
            instruction = self.body.instructions[at]
            if isinstance(instruction, Compute | Region):
                read = [self.num_bytes(copy) for copy in copies_read(instruction) if not self._stays(copy, position)]
                freed, made = max(read, default=0), copies_made(instruction)
                if made and freed >= least_bytes and 2 * sum(map(self.num_bytes, made)) < freed:
                    yield at, freed

    def _results(self, position: int, places: Iterable[int], idle: Sequence[int]) -> Iterator[Copy]:
        """What comes of the instructions at some places before another one."""
        among = frozenset(idle)
        yield from (self._added(copies_made(self.body.instructions[at])[0], position, among) for at in places)

    def _idle(self, position: int, begin: int) -> Iterator[int]:
        needed = set(copies_read(self.body.instructions[position]))
        for at in reversed(range(begin, position)):
            instruction = self.body.instructions[at]
            if needed.isdisjoint(copies_made(instruction)):
                yield at
            else:
                needed.update(copies_read(instruction))

    def _stays(self, copy: Copy, position: int) -> bool:
        return copy in self.stay or self.readers[copy][-1] >= position

    def _added(self, copy: Copy, position: int, idle: AbstractSet[int]) -> Copy:
        """What becomes of a copy before a place by elementwise operations that alone read it."""
        for at, made in self._line(copy):
            if at >= position or at not in idle or isinstance(self.body.instructions[at], Move):
                break
            copy = made
        return copy

    def _line(self, copy: Copy) -> Iterator[tuple[int, Copy]]:
        """Elementwise work and moves one behind the other that alone read what the one before made, and what each makes."""
        readers = self.readers.get(copy, [])
        while len(readers) == 1 and copy not in self.stay:
            reader, shape = self.body.instructions[readers[0]], copy[0].aval.shape
            made = copies_made(reader)
            is_light = isinstance(reader, Move) or (isinstance(reader, Compute) and not reader.rule.summed)
            if not is_light or len(made) != 1 or made[0][0].aval.shape != shape:
                return
            copy = made[0]
            yield readers[0], copy
            readers = self.readers.get(copy, [])
