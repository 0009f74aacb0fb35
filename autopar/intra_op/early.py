"""Sends sums as soon as they can be: a gradient over devices when it is made, not when the update reads it.

In:     a sharded program, in which each conversion stands before its first reader; the phase of each equation.
Out:    the same, with an all-reduce or a reduce-scatter right after what it sums, if nothing else reads that; and slices of
        the sum right after it.
Method: such a sum takes no more memory than what it sums, and often a fraction; and the backward pass goes on beside it. But
        none moves in a program whose forward or backward pass itself waits for collectives, as for gradients of activations
        or statistics of the batch: messages run one after another, so that those would wait, too. Nor in one that copies to or
        from the memory of the hosts: its copies keep its order.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from autopar._jax import JaxprEqn, Literal
from autopar.cost.steps import AllReduce, ReduceScatter, Slice
from autopar.intra_op.graph import Phase
from autopar.intra_op.host_order import copies_any_host
from autopar.intra_op.sharded import (
    Body,
    Compute,
    Copy,
    Instruction,
    Move,
    Region,
    communicates,
    with_bodies,
)
from autopar.intra_op.traffic import is_fused, is_view

Phases = Mapping[JaxprEqn, Phase]


def send_early(body: Body, phases: Phases) -> Body:
    """Place the sums of a program early, in loops and branches, too."""
    inside = [with_bodies(i, lambda inner: send_early(inner, phases)) for i in body.instructions]
    if not any(map(_is_sum, inside)) or copies_any_host(inside) or _waits(inside, phases):
        return dataclasses.replace(body, instructions=tuple(inside))
    readers = Counter([copy for i in inside for copy in i.needs])
    readers.update([copy for copy in body.outputs if not isinstance(copy[0], Literal)])
    makers = Counter([copy for i in inside for copy in i.makes])
    behind: list[int] = []  # per instruction, the one that it stands right after, or itself
    made_at: dict[Copy, int] = {}
    for at, instruction in enumerate(inside):
        made = _summed_at(instruction, inside, made_at) if isinstance(instruction, Move) else -1
        alone = made >= 0 and readers[instruction.reads[0]] == 1
        once = alone and all(makers[copy] == 1 for copy in (*instruction.reads, *instruction.makes))
        behind.append(behind[made] if once else at)
        for copy in instruction.makes:
            made_at[copy] = at
    order = sorted(range(len(inside)), key=behind.__getitem__)
    return dataclasses.replace(body, instructions=tuple(inside[at] for at in order))


def _is_sum(instruction: Instruction) -> bool:
    return isinstance(instruction, Move) and isinstance(instruction.step, AllReduce | ReduceScatter)


def _summed_at(instruction: Instruction, before: Sequence[Instruction], made_at: Mapping[Copy, int]) -> int:
    """Where what a sum over devices reads is made, or the sum that is sliced; -1: it is neither, or waits for more."""
    if not isinstance(instruction, Move) or instruction.earlier is not None:
        return -1
    made = made_at.get(instruction.reads[0], -1)
    if isinstance(instruction.step, AllReduce | ReduceScatter):
        return made
    is_slice = isinstance(instruction.step, Slice) and made >= 0
    return made if is_slice and _summed_at(before[made], before, made_at) >= 0 else -1


def _waits(instructions: Sequence[Instruction], phases: Phases) -> bool:
    """Whether a collective stands between heavy work of the forward or backward pass, or in a loop of it."""
    worked: set[Copy] = set()  # what heavy work leads to
    sent: set[Copy] = set()  # of that, what a collective leads to
    for i in instructions:
        is_heavy, is_sent = _is_heavy(i, phases), not sent.isdisjoint(i.reads)
        if (is_heavy and is_sent) or (isinstance(i, Region) and communicates(i)):
            return True
        is_behind = not worked.isdisjoint(i.reads)
        if is_heavy or is_behind:
            worked.update(i.makes)
        if is_sent or (is_behind and communicates(i)):
            sent.update(i.makes)
    return False


def _is_heavy(instruction: Instruction, phases: Phases) -> bool:
    """Whether an instruction of the forward or backward pass is more than elementwise work."""
    if isinstance(instruction, Region):
        return phases.get(instruction.eqn) != "u"
    if not isinstance(instruction, Compute) or is_view(instruction.eqn):
        return False
    return phases.get(instruction.eqn) != "u" and not is_fused(instruction)
