"""Delays elementwise work whose operands are ready early until just before it is read.

In:     a sharded body.
Out:    the delays: of an operand of an instruction, for that instruction alone.
Method: a latency-hiding scheduler fills the time of a collective with whatever could run. In a backward pass that is the
        elementwise recomputation of all layers (attention probabilities from exponentials, activations from their inputs,
        transposed operands of products), whose results would all be alive until they are read. Here each piece of it waits
        for the last heavy operation (not elementwise) that its reader's other operands depend on; if that is a collective,
        for the one before, so that both may overlap. In a loop's body, where that may be of the trip before, it waits for the
        largest carry: compilers peel the first trip off, and would begin it before what the loop waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from autopar._jax import Literal, copies_to_or_from_host
from autopar.intra_op.sharded import Body, Compute, Copy, Fused, Gate, Instruction, Move
from autopar.intra_op.traffic import is_fused, takes_waits
from autopar.partition.order import Delay
from autopar.tuning import TUNING


def late_delays(body: Body, num_bytes: Callable[[Copy], int], carries: Sequence[Copy] = ()) -> list[Delay]:
    """Delay elementwise work, at most one operand of an instruction; `num_bytes`: bytes of a copy on one device.

    `carries`: of the loop that the body is of.
    """
    return list({delay.position: delay for delay in _Walk(body, num_bytes, carries).delays()}.values())


class _Walk:
    """A walk through a body; `depth`: the position of the last heavy instruction that a copy depends on; -1: none but those
    of the loop's trip before; -2: none."""

    def __init__(self, body: Body, num_bytes: Callable[[Copy], int], carries: Sequence[Copy]):
        self.body, self.num_bytes = body, num_bytes
        self.carries = sorted(carries, key=num_bytes)
        self.depth: dict[Copy, int] = dict.fromkeys(body.inputs, -2) | dict.fromkeys(carries, -1)
        self.maker: dict[Copy, int] = {}
        self.deepest: list[int] = []  # per instruction, the greatest depth of its operands

    def delays(self) -> Iterator[Delay]:
        for place, instruction in enumerate(self.body.instructions):
            read = instruction.reads
            deepest = max((self.depth[copy] for copy in read), default=-2)
            self.deepest.append(deepest)
            is_light = _is_light(instruction)
            if isinstance(instruction, Compute) and not is_light:
                before = self._work_before(deepest)
                for k, copy in enumerate(read):
                    if self.depth[copy] < before and self.num_bytes(copy) >= TUNING.again_bytes:
                        yield from self._begin(copy, before, place if _is_turned(instruction, k) else None)
            for copy in instruction.makes:
                self.depth[copy], self.maker[copy] = deepest if is_light else place, place

    def _work_before(self, place: int) -> int:
        """The nearest instruction at or before a position, along dependences, that sends nothing; negative as a depth."""
        while place >= 0 and _sends(self.body.instructions[place]):
            place = self.deepest[place]
        return place

    def _begin(self, copy: Copy, before: int, reader: int | None) -> Iterator[Delay]:
        """The delay of the first elementwise instruction that leads to a copy; for an input, of a `reader` that transposes
        it."""
        awaited = self.body.instructions[before].makes[0] if before >= 0 else self.carries[-1]
        place, seen = self.maker.get(copy, -1), {copy}
        line = [place] if place > before else []
        for at in line:
            for operand in self.body.instructions[at].reads:
                if operand not in seen and self.maker.get(operand, -1) > before:
                    seen.add(operand)
                    line.append(self.maker[operand])
        first = min((at for at in line if takes_waits(self.body.instructions[at])), default=None)
        if first is not None:
            smallest = min(self.body.instructions[first].reads, key=self.num_bytes)
            yield Delay(first, (smallest,), (awaited,), lasts=False)
        elif reader is not None and copy not in self.maker:
            yield Delay(reader, (copy,), (awaited,), lasts=False)


def _is_light(instruction: Instruction) -> bool:
    """Whether an instruction is elementwise work, which can be fused into other kernels."""
    if isinstance(instruction, Compute):
        return is_fused(instruction) and not instruction.strategy.reductions
    return isinstance(instruction, Gate)


def _sends(instruction: Instruction) -> bool:
    """Whether an instruction moves data between devices, or to or from their hosts."""
    is_copy = isinstance(instruction, Compute) and copies_to_or_from_host(instruction.eqn)
    return is_copy or isinstance(instruction, Move | Fused)


def _is_turned(instruction: Compute, operand: int) -> bool:
    """Whether a batched product transposes an operand before, because its batch dims are not the leading ones."""
    eqn = instruction.eqn
    if eqn.primitive.name != "dot_general" or any(isinstance(atom, Literal) for atom in eqn.invars):
        return False
    batch = eqn.params["dimension_numbers"][1][operand]
    return sorted(batch) != list(range(len(batch)))
