"""Makes a backward pass wait for gradients on their way; XLA would send them all after it.

In:     a sharded body.
Out:    the delays: of an operand of an instruction, for that instruction alone.
Method: only the update reads the sum of a gradient over devices. A scheduler that hides latency goes backwards from the end of
        the program, so it meets all these sums first and puts them at the end, one after another, where few kernels are left
        to overlap with. Until then the unreduced gradients, and what they are computed from, stay in memory.
        So the work that leads to a later gradient waits for the earlier sums, except the last ones of together half of
        a bucket, which may still run beside it. It also waits for other sums that free memory and lead to none of these,
        such as gradients of a norm's scale. The wait is put on an elementwise operation, which fuses it: of those before a
        gradient, the last of those that lead furthest. A loop that communicates waits for all: nothing is sent beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.cost.steps import AllReduce, ReduceScatter
from autopar.intra_op.sharded import Body, Compute, Copy, Fused, Instruction, Move, Region
from autopar.intra_op.traffic import takes_waits
from autopar.partition.order import Delay, communicates
from autopar.tuning import TUNING

LATE_BYTES = TUNING.late_bytes
"""Sums of less may stay in memory."""

Bytes = Callable[[Copy], int]


def unsent_delays(body: Body, num_bytes: Bytes) -> list[Delay]:
    """Delay loops, and work that leads to later gradients; `num_bytes`: bytes of a copy on one device."""
    # Sums that lead to others, as of a layer's output, are waited for anyway.
    small = min(LATE_BYTES, body.bucket / 2)
    reduced = {at: size for at, i in enumerate(body.instructions) if (size := _sum_bytes(i, num_bytes)) >= small}
    furthest = _furthest(body, reduced)
    sums = {at: size for at, size in reduced.items() if furthest[at] == at}
    loops = {at for at, i in enumerate(body.instructions) if isinstance(i, Region) and i.reads and communicates(i)}
    ends = [at for at, i in enumerate(body.instructions) if furthest[at] < 0 and _is_sum(i, num_bytes)]
    found: list[Delay] = []
    sent: list[int] = []  # sums that nothing waits for yet, in order
    for place in sorted({*sums, *loops}):
        least = 0 if place in loops else body.bucket / 2
        done = next((k for k in reversed(range(len(sent))) if sum(sums[at] for at in sent[k + 1 :]) >= least), None)
        if done is not None:
            begin = sent[done] + 1
            among = [at for at in range(begin, place) if furthest[at] >= place and takes_waits(body.instructions[at])]
            last = place if place in loops else max(among, key=lambda at: (furthest[at], at), default=None)
            if last is not None:
                first = min(body.instructions[last].reads, key=num_bytes)
                summed = [*sent[: done + 1], *(at for at in ends if at < last)]
                awaited = tuple(body.instructions[at].makes[0] for at in summed)
                found.append(Delay(last, (first,), awaited, lasts=False))
                sent, ends = sent[done + 1 :], [at for at in ends if at > last]
        if place in sums:
            sent.append(place)
    return found


def _sum_bytes(instruction: Instruction, num_bytes: Bytes) -> int:
    """Return the bytes that a reduce-scatter or all-reduce reads; 0 for all other instructions."""
    if not isinstance(instruction, Move | Fused) or not isinstance(
        instruction.moves[0].step, AllReduce | ReduceScatter
    ):
        return 0
    return sum(map(num_bytes, instruction.reads))


def _is_sum(instruction: Instruction, num_bytes: Bytes) -> bool:
    """Whether an operation sums a large array and returns less than half of it."""
    if not isinstance(instruction, Compute) or not instruction.rule.summed:
        return False
    largest = max(map(num_bytes, instruction.reads), default=0)
    return largest >= LATE_BYTES and 2 * sum(map(num_bytes, instruction.makes)) < largest


def _furthest(body: Body, sums: Mapping[int, int]) -> list[int]:
    """Return for each instruction the position of the last of the sums that depends on it; -1: none does."""
    found = [-1] * len(body.instructions)
    needed: dict[Copy, int] = {}
    for at in reversed(range(len(body.instructions))):
        instruction = body.instructions[at]
        found[at] = max([at if at in sums else -1, *(needed.get(copy, -1) for copy in instruction.makes)])
        for copy in instruction.reads:
            needed[copy] = max(found[at], needed.get(copy, -1))
    return found
