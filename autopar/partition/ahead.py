"""Orders work that frees memory before loops, recomputation and large arrays, where compilers would postpone it.

In:     a sharded body.
Out:    the delays; and what a loop waits for.
Method: latency-hiding schedulers run work first that other work depends on. The gradient of a model's head is read by the
        update alone, so they would postpone it past the loop of the backward pass, and keep the logits throughout. So a loop
        waits for earlier work that it does not depend on, if that work reads a large array for the last time and makes less
        of it. A product that is only added to something is awaited after the addition, since both are one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from autopar._jax import JaxprEqn, Literal, on_host
from autopar.grouping import grouped
from autopar.intra_op.held import kept_narrow
from autopar.intra_op.host_order import copies_host
from autopar.intra_op.sharded import Body, Compute, Copy, Gate, Instruction, Move, Region, communicates
from autopar.intra_op.traffic import is_fused, takes_waits
from autopar.intra_op.unsent import unsent_waits
from autopar.ir.gradient import is_backward
from autopar.ir.region import kind_of, region_of
from autopar.partition.order import Delay
from autopar.tuning import TUNING


class Ahead:
    """Finds what is waited for in a body; `num_bytes`: bytes of a copy on one device."""

    def __init__(self, body: Body, num_bytes: Callable[[Copy], int]):
        self.body, self.num_bytes = body, num_bytes
        self.made_at = dict.fromkeys(body.inputs, -1)
        self.readers = grouped(
            (copy, k) for k, instruction in enumerate(body.instructions) for copy in instruction.reads
        )
        for position, instruction in enumerate(body.instructions):
            self.made_at.update(dict.fromkeys(instruction.makes, position))
        regions = {k: i for k, i in enumerate(body.instructions) if isinstance(i, Region)}
        self.loops = {k: i for k, i in regions.items() if kind_of(i.eqn) in ("scan", "while")}
        self.stay = {*body.inputs, *body.results}
        self.light = {k for k, i in enumerate(body.instructions) if isinstance(i, Compute) and is_fused(i)}

    def delays(self) -> Iterator[Delay]:
        """All delays; of those of one position, the ones that last come first."""
        kinds = (
            self.residuals,
            self.final_carries,
            self.seeds,
            self.recomputation,
            self.large_arrays,
            self.loop_constants,
        )
        return (delay for find in kinds for delay in find())

    def only_reader(self, instruction: Instruction) -> JaxprEqn | None:
        """The equation that alone reads all that an instruction makes; None: there are several readers, or another kind."""
        readers = {k for copy in instruction.makes for k in self.readers.get(copy, ())}
        if len(readers) != 1 or not self.stay.isdisjoint(instruction.makes):
            return None
        reader = self.body.instructions[readers.pop()]
        return reader.eqn if isinstance(reader, Compute) else None

    def before_loop(self, position: int) -> list[tuple[Copy, int]]:
        """Copies that a loop at this position waits for, and the bytes on one device that each of them frees."""
        return self.done_before(position, 0, TUNING.late_bytes) if position in self.loops else []

    def loop_constants(self) -> Iterator[Delay]:
        """Large operands of a loop that depend on constants alone, such as a mask, wait for its largest carry.

        A loop that reads the same makes its own: one that is shared would be kept between the loops.
        """
        fixed: set[Copy] = set()
        for instruction in self.body.instructions:
            if isinstance(instruction, Compute) and fixed.issuperset(instruction.reads):
                fixed.update(instruction.makes)
        for position, loop in self.loops.items():
            parts = region_of(loop.eqn)
            given = zip(parts.of_operands(parts.bindings), loop.eqn.invars, loop.operands, strict=True)
            carries = [(a, s) for b, a, s in given if b.role == "carry" and not isinstance(a, Literal)]
            large = tuple(dict.fromkeys(copy for copy in loop.reads if copy in fixed and self._is_large(copy)))
            if large and carries:
                yield Delay(position, large, (max(carries, key=self.num_bytes),), lasts=False)

    def final_carries(self) -> Iterator[Delay]:
        """Carries of a scan that communicates wait for its stacks with large rows that another loop reads.

        Compilers peel its last trip off, and would write its rows only when that other loop begins.
        """
        for position, loop in self.loops.items():
            if kind_of(loop.eqn) == "scan" and communicates(loop):
                parts = region_of(loop.eqn)
                count, least = len(parts.carries), TUNING.late_bytes * parts.trips
                wide = [c for c in loop.makes[count:] if self.num_bytes(c) >= least and not on_host(c[0].aval)]
                awaited = tuple(c for c in wide if not self.loops.keys().isdisjoint(self.readers.get(c, ())))
                if awaited:
                    yield Delay(position + 1, loop.makes[:count], awaited)

    def seeds(self) -> Iterator[Delay]:
        """Constants that a backward pass begins with wait for the loss: else the logits would be kept for it."""
        results = {var for var, _ in self.body.results}
        losses: list[Copy] = []
        for position, instruction in enumerate(self.body.instructions):
            if isinstance(instruction, Compute) and not any(map(self._is_large, instruction.makes)):
                if losses and _is_seed(instruction):
                    yield Delay(position + 1, instruction.makes, tuple(losses))
                losses += [(var, s) for var, s in instruction.makes if var in results and not var.aval.shape]

    def residuals(self) -> Iterator[Delay]:
        """The backward pass reads 16-bit values that are slow to compute through a barrier.

        Compilers would otherwise keep them in the 32 bits that they are computed in.
        """
        kept = kept_narrow([i for i in self.body.instructions if isinstance(i, Compute)])
        for position, instruction in enumerate(self.body.instructions):
            if isinstance(instruction, Compute) and is_backward(instruction.eqn):
                read = tuple(c for c in dict.fromkeys(instruction.reads) if c[0] in kept and self._is_large(c))
                if read:
                    kept.difference_update(var for var, _ in read)
                    yield Delay(position, read, ())

    def _is_large(self, copy: Copy) -> bool:
        return self.num_bytes(copy) >= TUNING.late_bytes

    def recomputation(self) -> Iterator[Delay]:
        """Operands of recomputation wait for the gradient of the layer's output, and for work that frees memory.

        Otherwise the activations of all layers would be alive until the weight gradients are computed.
        """
        begin = 0
        for position in self.recomputed_at():
            gradient, delayed = self._recomputed_from(self.body.instructions[position])
            if delayed and self.made_at[gradient] >= 0:
                first = self.done_before(position, begin, TUNING.again_bytes)
                yield Delay(position, tuple(delayed), (gradient, *(copy for copy, _ in first)), whole=True)
            begin = position

    def recomputed_at(self) -> Iterator[int]:
        """Positions of gates, and of barriers but those over the body's inputs, moved or elementwise converted."""
        given = set(self.body.inputs)
        for position, instruction in enumerate(self.body.instructions):
            match instruction:
                case Gate():
                    yield position
                case Region(eqn):
                    if kind_of(eqn) == "barrier" and not given.issuperset(instruction.reads):
                        yield position
                case _ if given.issuperset(instruction.reads):
                    if not isinstance(instruction, Compute) or not instruction.rule.summed:
                        given.update(instruction.makes)

    def _recomputed_from(self, instruction: Instruction) -> tuple[Copy, Sequence[Copy]]:
        """The gradient of a layer's output, which is the operand made last; and the operands that wait for it.

        These are operands that the body has made; if there are none, the inputs of the gradient's shape.
        """
        if isinstance(instruction, Gate):
            return instruction.earlier, instruction.copies
        read = [copy for copy in dict.fromkeys(instruction.reads) if not on_host(copy[0].aval)]
        gradient = max(read or instruction.reads, key=lambda copy: self.made_at[copy])
        others = [copy for copy in read if copy != gradient]
        alike = [copy for copy in others if copy[0].aval.shape == gradient[0].aval.shape]
        delayed = [copy for copy in others if self.made_at[copy] >= 0] or alike or others
        return gradient, [copy for copy in delayed if self.num_bytes(copy) >= TUNING.again_bytes]

    def large_arrays(self) -> Iterator[Delay]:
        """An operation that makes one of the body's largest arrays waits for pending work, through its smallest operand.

        If that is large, only elementwise work waits, while it reads it; but none where copies to or from the memory of the
        hosts keep their order.
        """
        is_free = not any(map(copies_host, self.body.instructions))
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
                is_small = smallest is not None and self.num_bytes(smallest) <= enough
                if smallest is not None and not is_small:
                    waits = is_free and takes_waits(instruction)
                    first = {at: freed for at, freed in first.items() if waits and self._is_apart(at, smallest)}
                if first and smallest is not None:
                    freeing = [at for at in freeing if at not in first]
                    yield Delay(position, (smallest,), tuple(self._results(position, first, idle)), is_small)
            if self._frees(position):
                freeing.append(position)
                line = [step for copy in instruction.makes for step in self._line(copy)]
                is_sum = bool(line) and line[-1][1] in self.stay
                behind.update(at for at, _ in line if is_sum or self._is_cast(at))

    def unsent(self) -> Iterator[Delay]:
        """The backward pass waits for earlier sums of gradients over devices."""
        for wait in unsent_waits(self.body, self.num_bytes):
            sums = tuple(self.body.instructions[at].makes[0] for at in wait.sums)
            yield Delay(wait.position, (wait.copy,), sums, lasts=False)

    def _is_apart(self, position: int, waiting: Copy) -> bool:
        """Whether work that frees memory shares no elementwise work with others; `waiting` is in memory.

        What is made for it alone would otherwise be made by one kernel with what others read. A reduction of inputs
        frees nothing.
        """
        instructions = self.body.instructions
        alone = [copy for copy in instructions[position].reads if self.readers[copy] == [position]]
        places, sources = {position}, set()
        for copy in alone:
            maker = self.made_at[copy]
            if copy == waiting or maker not in self.light:
                sources.add(copy)
            elif maker not in places:
                places.add(maker)
                alone.extend(instructions[maker].reads)
        is_shared = any(self.light.difference(places).intersection(self.readers[c]) for c in alone if c not in sources)
        is_of_inputs = all(self.made_at[copy] < 0 for copy in sources)
        return not is_shared and not (is_of_inputs and position in self.light)

    def _is_cast(self, position: int) -> bool:
        instruction = self.body.instructions[position]
        return isinstance(instruction, Compute) and instruction.eqn.primitive.name == "convert_element_type"

    def _frees(self, position: int) -> bool:
        """Whether an instruction reads large arrays that do not stay throughout the body, and makes much less of them."""
        instruction = self.body.instructions[position]
        if not isinstance(instruction, Compute | Region):
            return False
        freed = sum(self.num_bytes(copy) for copy in instruction.reads if copy not in self.stay)
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
        """Of the `idle` positions, those that read large arrays for the last time and make less of them; and their bytes."""
        for at in reversed(idle):
            instruction = self.body.instructions[at]
            if isinstance(instruction, Compute | Region):
                freed = sum(self.num_bytes(copy) for copy in instruction.reads if not self._stays(copy, position))
                made = instruction.makes
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


def _is_seed(compute: Compute) -> bool:
    """Whether an operation of the backward pass reads constants alone, not all zero: the seed of a gradient."""
    numbers = [atom.val for atom in compute.eqn.invars if isinstance(atom, Literal)]
    return not compute.reads and any(map(np.any, numbers)) and is_backward(compute.eqn)
