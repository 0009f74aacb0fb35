"""Finds what a backward pass waits for of the gradients on their way; XLA would send them all after it.

In:     a sharded body.
Out:    which instructions wait for which sums (`partition/ahead.py` makes them wait), and what stays in memory until then.
Method: only the update reads the sum of a gradient over devices. A scheduler that hides latency goes backwards from the end of
        the program, so it meets all these sums first and puts them at the end, one after another, where few kernels are left
        to overlap with. Until then the unreduced gradients, and what they are computed from, stay in memory.
        So the work that leads to a later gradient waits for the earlier sums, except the last ones of together half of
        a bucket, or an eighth of all, which may still run beside it. It also waits for other sums that free memory and
        lead to none of these, such as gradients of a norm's scale, and for products whose results are sent later, together
        with others. The wait is put on an elementwise operation, which fuses it: of those before a gradient, the last of
        those that lead furthest. A loop that communicates waits for all: nothing is sent beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from autopar.cost.steps import AllReduce, ReduceScatter, Step
from autopar.intra_op.kernels import is_contraction
from autopar.intra_op.sharded import Body, Compute, Copy, Fused, Instruction, Move, Region, communicates
from autopar.intra_op.traffic import is_fused, takes_waits
from autopar.tuning import TUNING

LATE_BYTES = TUNING.late_bytes
"""Sums of less may stay in memory."""

Bytes = Callable[[Copy], int]


@dataclass(frozen=True, slots=True)
class Wait:
    """The instruction at `position`, through `copy`, which it reads, waits for the instructions at `sums`."""

    position: int
    copy: Copy
    sums: tuple[int, ...]


def unsent_waits(body: Body, num_bytes: Bytes) -> list[Wait]:
    """Waits of loops, and of work that leads to later gradients; `num_bytes`: bytes of a copy on one device."""
    return _find_waits(body, num_bytes, _last_sums(body, num_bytes))


def unsent_copies(body: Body, num_bytes: Bytes) -> Iterator[tuple[Copy, int]]:
    """Copies that stay until the instruction that waits for their sums over devices, which may be on their way until then.

    Of reduce-scatters that nothing waits for these are the operands, to the end; of all-reduces the results, which take the
    place of the operands. Arguments as in `unsent_waits`.
    """
    sums = _last_sums(body, num_bytes)
    until = {at: len(body.instructions) - 1 for at in sums.before if not _all_reduces(body.instructions[at])}
    for wait in _find_waits(body, num_bytes, sums):
        until |= {at: wait.position for at in wait.sums if at in sums.before}
    for at, end in until.items():
        instruction = body.instructions[at]
        yield from ((copy, end) for copy in (instruction.makes if _all_reduces(instruction) else instruction.reads))


@dataclass(frozen=True, slots=True)
class _Sums:
    """Large sums over devices.

    Attributes:
        before: The bytes that each sum reads which leads to no other sum: those are waited for anyway.
        furthest: For each instruction the position of the last of all sums that depends on it; -1: none does.
    """

    before: Mapping[int, int]
    furthest: list[int]


def _last_sums(body: Body, num_bytes: Bytes) -> _Sums:
    small = min(LATE_BYTES, body.bucket / 2)
    reduced = {at: size for at, i in enumerate(body.instructions) if (size := _sum_bytes(i, num_bytes)) >= small}
    furthest = _furthest(body, reduced)
    return _Sums({at: size for at, size in reduced.items() if furthest[at] == at}, furthest)


def _find_waits(body: Body, num_bytes: Bytes, found: _Sums) -> list[Wait]:
    sums, furthest = found.before, found.furthest
    loops = {at for at, i in enumerate(body.instructions) if isinstance(i, Region) and i.reads and communicates(i)}
    packed = set(_packed_products(body, sums))
    ends = [
        at for at, i in enumerate(body.instructions) if (furthest[at] < 0 or at in packed) and _is_sum(i, num_bytes)
    ]
    beside = min(body.bucket / 2, sum(sums.values()) / 8)
    waits: list[Wait] = []
    sent: list[int] = []  # sums that nothing waits for yet, in order
    for place in sorted({*sums, *loops}):
        least = 0 if place in loops else beside
        done = next((k for k in reversed(range(len(sent))) if sum(sums[at] for at in sent[k + 1 :]) >= least), None)
        if done is not None:
            begin = sent[done] + 1
            among = [at for at in range(begin, place) if furthest[at] >= place and takes_waits(body.instructions[at])]
            last = place if place in loops else max(among, key=lambda at: (furthest[at], at), default=None)
            if last is not None:
                first = min(body.instructions[last].reads, key=num_bytes)
                waits.append(Wait(last, first, (*sent[: done + 1], *(at for at in ends if at < last))))
                sent, ends = sent[done + 1 :], [at for at in ends if at > last]
        if place in sums:
            sent.append(place)
    return waits


def _sum_bytes(instruction: Instruction, num_bytes: Bytes) -> int:
    """Return the bytes that a reduce-scatter or all-reduce reads; 0 for all other instructions."""
    is_sum = isinstance(_first_step(instruction), AllReduce | ReduceScatter)
    return sum(map(num_bytes, instruction.reads)) if is_sum else 0


def _all_reduces(instruction: Instruction) -> bool:
    return isinstance(_first_step(instruction), AllReduce)


def _first_step(instruction: Instruction) -> Step | None:
    """The step of a move, or of the first of fused moves."""
    return instruction.moves[0].step if isinstance(instruction, Move | Fused) else None


def _is_sum(instruction: Instruction, num_bytes: Bytes) -> bool:
    """Whether an operation sums a large array and returns less than half of it."""
    if not isinstance(instruction, Compute) or not instruction.rule.summed:
        return False
    largest = max(map(num_bytes, instruction.reads), default=0)
    return largest >= LATE_BYTES and 2 * sum(map(num_bytes, instruction.makes)) < largest


def _packed_products(body: Body, sums: Iterable[int]) -> Iterator[int]:
    """Products whose results, perhaps cast, are sent together with others by one of the sums."""
    made_at = {copy: at for at, i in enumerate(body.instructions) for copy in i.makes}
    for together in (i for at in sums if isinstance(i := body.instructions[at], Fused)):
        for copy in together.reads:
            while (at := made_at.get(copy)) is not None and isinstance(maker := body.instructions[at], Compute):
                if not is_fused(maker) or len(maker.reads) != 1:
                    yield from [at] if is_contraction(maker.rule) else []
                    break
                (copy,) = maker.reads


def _furthest(body: Body, sums: Mapping[int, int]) -> list[int]:
    """Return for each instruction the position of the last of the sums that depends on it; -1: none does."""
    found = [-1] * len(body.instructions)
    needed: dict[Copy, int] = {}
    for at in reversed(range(len(body.instructions) if sums else 0)):
        instruction, last = body.instructions[at], at if at in sums else -1
        for copy in instruction.makes:
            last = max(last, needed.get(copy, -1))
        found[at] = last
        for copy in instruction.reads if last >= 0 else ():
            needed[copy] = max(last, needed.get(copy, -1))
    return found
