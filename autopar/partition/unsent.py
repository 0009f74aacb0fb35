"""Makes a backward pass wait for gradients that are on their way: compilers would send them all behind its end.

In:     a sharded body.
Out:    for places in it a copy that is read there and those that it waits for.
Method: nobody reads the gradient of a layer that is written out before the update does. A scheduler that hides latency goes
        from the end of the program to its begin, and finds all these messages first: they are sent one behind the other where
        little is left to hide them, and until then there are the sums that they make smaller, and what those are made of.
        So what leads to further such sums waits for all messages but the last, as many as are sent as one (`BUCKET_BYTES`),
        and for what else was made smaller meanwhile and leads to none, such as gradients of a norm. Of the elementwise work
        before a sum, which takes the wait in, what leads furthest waits, and of that the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from autopar.cost.steps import ReduceScatter
from autopar.intra_op.fuse import BUCKET_BYTES
from autopar.intra_op.sharded import Body, Compute, Copy, Instruction, Move, copies_made, copies_read
from autopar.intra_op.traffic import VIEWS, is_fused
from autopar.tuning import TUNING

LATE_BYTES = TUNING.late_bytes

Bytes = Callable[[Copy], int]


def unsent_waits(body: Body, num_bytes: Bytes) -> Iterator[tuple[int, tuple[Copy, list[Copy]]]]:
    """Places, what is read there, and what that waits for; `num_bytes` says how large copies are on one device."""
    sums = {at: size for at, i in enumerate(body.instructions) if (size := _sum_bytes(i, num_bytes))}
    furthest = _furthest(body, sums)
    ends = [at for at, i in enumerate(body.instructions) if furthest[at] < 0 and _is_sum(i, num_bytes)]
    sent: list[int] = []  # that nothing waits for yet, in order
    for place in sums:
        done = next((k for k in reversed(range(len(sent))) if sum(sums[at] for at in sent[k + 1 :]) >= BUCKET_BYTES), None)
        if done is not None:
            begin = sent[done] + 1
            among = [at for at in range(begin, place) if furthest[at] > place and _takes_in(body.instructions[at])]
            if among:
                last = max(among, key=lambda at: (furthest[at], at))
                first = min(copies_read(body.instructions[last]), key=num_bytes)
                awaited = [*sent[: done + 1], *(at for at in ends if at < last)]
                yield last, (first, [copy for at in awaited for copy in copies_made(body.instructions[at])])
                sent, ends = sent[done + 1 :], [at for at in ends if at > last]
        sent.append(place)


def _sum_bytes(instruction: Instruction, num_bytes: Bytes) -> int:
    """Bytes of a large sum that is sent, each device a part of it; 0: it is something else."""
    if not isinstance(instruction, Move) or not isinstance(instruction.step, ReduceScatter):
        return 0
    size = num_bytes((instruction.var, instruction.source))
    return size if size >= LATE_BYTES else 0


def _is_sum(instruction: Instruction, num_bytes: Bytes) -> bool:
    """Whether an operation reads something large, and makes less of it."""
    if not isinstance(instruction, Compute) or not instruction.rule.summed:
        return False
    largest = max(map(num_bytes, copies_read(instruction)), default=0)
    return largest >= LATE_BYTES and 2 * sum(map(num_bytes, copies_made(instruction))) < largest


def _furthest(body: Body, sums: Mapping[int, int]) -> list[int]:
    """For each instruction the last of the sums that it leads to; -1: none."""
    found = [-1] * len(body.instructions)
    needed: dict[Copy, int] = {}
    for at in reversed(range(len(body.instructions))):
        instruction = body.instructions[at]
        found[at] = max([at if at in sums else -1, *(needed.get(copy, -1) for copy in copies_made(instruction))])
        for copy in copies_read(instruction):
            needed[copy] = max(found[at], needed.get(copy, -1))
    return found


def _takes_in(instruction: Instruction) -> bool:
    """Whether it is elementwise work of arrays, into which a wait goes without a pass over memory."""
    if not isinstance(instruction, Compute) or not instruction.reads or not is_fused(instruction):
        return False
    return instruction.eqn.primitive.name not in VIEWS and not instruction.strategy.reductions
