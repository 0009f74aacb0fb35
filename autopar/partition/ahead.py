"""Orders work that frees memory before loops, recomputation and large arrays, where compilers would postpone it.

In:     a sharded body, and positions in it: of a loop, or of the barrier or gate at which recomputation begins.
Out:    the copies that are waited for there.
Method: latency-hiding schedulers run work first that other work depends on. The gradient of a model's head is read by the
        update alone, so they would postpone it past the loop of the backward pass, and keep the logits throughout. So:
        - A loop waits for earlier work that it does not depend on, if that work reads a large array for the last time and
          makes less of it.
        - Recomputation, layer by layer, waits likewise: otherwise the activations of all layers would be alive until the
          weight gradients are computed. A product that is only added to something is awaited after the addition, since
          both are one kernel.
        - The constants that the backward pass begins with wait for the loss: otherwise the logits would be kept for it.
        - An operation that makes a large array (attention scores) waits, through its smallest operand, for pending work
          that frees memory.
        - Carries of a loop wait for its stacks that another loop reads: compilers peel the last trip off a loop that
          communicates, and would write its rows only when that other loop begins.
        - Values of constants alone that two loops read are computed twice: else they would be kept between the loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from autopar._jax import Literal, on_host
from autopar.intra_op.sharded import Body, Compute, Copy, Fused, Gate, Instruction, Move, Region
from autopar.ir.gradient import is_backward
from autopar.ir.region import kind_of, region_of
from autopar.tuning import TUNING


def waits_at(instruction: Instruction) -> bool:
    """Whether recomputation begins at an instruction: a barrier or a gate."""
    return isinstance(instruction, Gate) or (isinstance(instruction, Region) and kind_of(instruction.eqn) == "barrier")


def is_seed(compute: Compute) -> bool:
    """Whether an operation of the backward pass reads constants alone, not all zero: the seed of a gradient."""
    numbers = [atom.val for atom in compute.eqn.invars if isinstance(atom, Literal)]
    return not compute.reads and any(map(np.any, numbers)) and is_backward(compute.eqn)


class Ahead:
    """Finds what is waited for in a body; `num_bytes`: bytes of a copy on one device."""

    def __init__(self, body: Body, num_bytes: Callable[[Copy], int]):
        self.body, self.num_bytes = body, num_bytes
        self.made_at = dict.fromkeys(body.inputs, -1)
        self.readers: dict[Copy, list[int]] = {}
        for position, instruction in enumerate(body.instructions):
            for copy in instruction.reads:
                self.readers.setdefault(copy, []).append(position)
            self.made_at.update(dict.fromkeys(instruction.makes, position))
        given = self._given()
        self.waits = [k for k, i in enumerate(body.instructions) if waits_at(i) and not given.issuperset(i.reads)]
        self.stay = {*body.inputs, *((a, s) for a, s in body.outputs if not isinstance(a, Literal))}
        self.of_large = dict(self._of_large())

    def _given(self) -> set[Copy]:
        """The body's inputs, also moved or elementwise converted: a barrier over these alone waits for nothing."""
        given = set(self.body.inputs)
        for instruction in self.body.instructions:
            is_form = isinstance(instruction, Move | Fused) or (
                isinstance(instruction, Compute) and not instruction.rule.summed
            )
            if is_form and given.issuperset(instruction.reads):
                given.update(instruction.makes)
        return given

    def of_loop(self, position: int) -> list[tuple[Copy, int]]:
        """Copies that a loop at this position waits for, and the bytes on one device that each of them frees."""
        return self.done_before(position, 0, TUNING.late_bytes) if self._is_loop(position) else []

    def of_numbers(self, position: int) -> list[Copy]:
        """Large copies that a loop at this position reads and that depend on constants alone, such as a mask."""
        made: set[Copy] = set()
        for instruction in self.body.instructions[:position] if self._is_loop(position) else ():
            if isinstance(instruction, Compute) and made.issuperset(instruction.reads):
                made.update(instruction.makes)
        read = dict.fromkeys(self.body.instructions[position].reads)
        return [copy for copy in read if copy in made and self.num_bytes(copy) >= TUNING.late_bytes]

    def behind_loop(self, position: int) -> list[Copy]:
        """Stacks with large rows that the scan at this position makes and another loop reads."""
        region = self.body.instructions[position]
        assert isinstance(region, Region)
        made, loop = region.makes, region_of(region.eqn)
        stacks = [copy for copy in made[len(loop.carries) :] if not on_host(copy[0].aval)]
        wide = [copy for copy in stacks if self.num_bytes(copy) >= TUNING.late_bytes * loop.trips]
        return [copy for copy in wide if any(map(self._is_loop, self.readers.get(copy, ())))]

    def _is_loop(self, position: int) -> bool:
        instruction = self.body.instructions[position]
        return isinstance(instruction, Region) and kind_of(instruction.eqn) in ("scan", "while")

    def of_again(self, position: int) -> tuple[list[Copy], list[Copy]]:
        """Operands of the recomputation that begins here which are to be delayed, and the copies that they wait for.

        Delayed are operands that the body has made; if there are none, the inputs of the shape of the layer's output
        gradient, which is the operand made last and the first that is waited for.
        """
        instruction = self.body.instructions[position]
        if isinstance(instruction, Gate):
            latest, delayed = instruction.earlier, list(instruction.copies)
        else:
            read = [copy for copy in dict.fromkeys(instruction.reads) if not on_host(copy[0].aval)]
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
        """Positions where one of the body's largest arrays is made: its smallest operand, and what that waits for."""
        made = [self._made_bytes(instruction) for instruction in self.body.instructions]
        least = max(TUNING.late_bytes, TUNING.large_part * max(made, default=0))
        freeing: list[int] = []  # positions of pending work that frees memory
        behind: set[int] = set()  # positions that only widen its results, or add them to a result of the body
        for position, instruction in enumerate(self.body.instructions):
            if made[position] >= least and freeing and position not in behind:
                idle = list(self._idle(position, freeing[0]))
                still = frozenset(idle)
                freeing = [at for at in freeing if at in still]
                first = {at: freed for at, freed in self._freed(position, idle, TUNING.late_bytes) if at in freeing}
                smallest = min(instruction.reads, key=self.num_bytes, default=None)
                enough = TUNING.late_part * max(first.values(), default=0)
                if first and smallest is not None and self.num_bytes(smallest) <= enough:
                    freeing = [at for at in freeing if at not in first]
                    yield position, (smallest, [*self._results(position, first, idle)])
            if self._frees(position):
                freeing.append(position)
                line = [step for copy in instruction.makes for step in self._line(copy)]
                is_sum = bool(line) and line[-1][1] in self.stay
                behind.update(at for at, _ in line if is_sum or self._is_cast(at))

    def _is_cast(self, position: int) -> bool:
        instruction = self.body.instructions[position]
        return isinstance(instruction, Compute) and instruction.eqn.primitive.name == "convert_element_type"

    def _frees(self, position: int) -> bool:
        """Whether an instruction reads a large array that does not stay throughout the body, and makes much less of it."""
        instruction = self.body.instructions[position]
        if not isinstance(instruction, Compute | Region):
            return False
        freed = max((self.num_bytes(copy) for copy in instruction.reads if copy not in self.stay), default=0)
        return freed >= TUNING.late_bytes and 2 * sum(map(self.num_bytes, instruction.makes)) < freed

    def _made_bytes(self, instruction: Instruction) -> int:
        """Bytes of the largest array that an operation makes; 0 for a broadcast, which its readers fuse."""
        if not isinstance(instruction, Compute) or instruction.eqn.primitive.name == "broadcast_in_dim":
            return 0
        return max(map(self.num_bytes, instruction.makes), default=0)

    def done_before(self, position: int, begin: int, least_bytes: int) -> list[tuple[Copy, int]]:
        """Results of work since `begin` that `position` does not depend on and that frees arrays; and the bytes freed."""
        idle = list(self._idle(position, begin))
        freed = dict(self._freed(position, idle, least_bytes))
        return list(dict.fromkeys(zip(self._results(position, freed, idle), freed.values(), strict=True)))

    def _freed(self, position: int, idle: Sequence[int], least_bytes: int) -> Iterator[tuple[int, int]]:
        """Of the `idle` positions, those that read a large array for the last time and make less of it; and its bytes."""
        for at in reversed(idle):
            instruction = self.body.instructions[at]
            if isinstance(instruction, Compute | Region):
                read = [self.num_bytes(copy) for copy in instruction.reads if not self._stays(copy, position)]
                freed, made = max(read, default=0), instruction.makes
                if made and freed >= least_bytes and 2 * sum(map(self.num_bytes, made)) < freed:
                    yield at, freed

    def _results(self, position: int, places: Iterable[int], idle: Sequence[int]) -> Iterator[Copy]:
        """The results of instructions at `places`, followed through elementwise work before `position`."""
        among = frozenset(idle)
        yield from (self._added(self.body.instructions[at].makes[0], position, among) for at in places)

    def _idle(self, position: int, begin: int) -> Iterator[int]:
        """Positions since `begin`, the last first, that `position` does not depend on."""
        needed = set(self.body.instructions[position].reads)
        for at in reversed(range(begin, position)):
            instruction = self.body.instructions[at]
            if needed.isdisjoint(instruction.makes):
                yield at
            else:
                needed.update(instruction.reads)

    def _stays(self, copy: Copy, position: int) -> bool:
        return copy in self.stay or self.readers[copy][-1] >= position

    def _added(self, copy: Copy, position: int, idle: AbstractSet[int]) -> Copy:
        """The last copy before `position` that elementwise work, as the only reader, makes of a copy."""
        for at, made in self._line(copy):
            if at >= position or at not in idle or isinstance(self.body.instructions[at], Move):
                break
            copy = made
        return copy

    def _line(self, copy: Copy) -> Iterator[tuple[int, Copy]]:
        """(position, result) of a chain of elementwise operations and moves, each the only reader of the one before."""
        readers = self.readers.get(copy, [])
        while len(readers) == 1 and copy not in self.stay:
            reader, shape = self.body.instructions[readers[0]], copy[0].aval.shape
            made = reader.makes
            is_light = isinstance(reader, Move) or (isinstance(reader, Compute) and not reader.rule.summed)
            if not is_light or len(made) != 1 or made[0][0].aval.shape != shape:
                return
            copy = made[0]
            yield readers[0], copy
            readers = self.readers.get(copy, [])
