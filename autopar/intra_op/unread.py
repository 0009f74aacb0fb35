"""Drops conversions that nothing reads: where a value's hub lies is chosen, and then each reader takes the nearest copy.

In:     a sharded program.
Out:    the same without moves to copies that neither an instruction nor a result reads. XLA leaves them out, too.
Method: from the results back: a move whose copy is not read from here on goes.
"""

from __future__ import annotations

import dataclasses

from autopar._jax import Literal
from autopar.intra_op.sharded import Body, Copy, Instruction, Move, Region, copies_awaited


def drop_unread(body: Body) -> Body:
    """The program without conversions that nothing reads, in loops and branches, too."""
    read: set[Copy] = {(atom, sharding) for atom, sharding in body.outputs if not isinstance(atom, Literal)}
    kept: list[Instruction] = []
    for instruction in reversed(body.instructions):
        made = instruction.makes
        if isinstance(instruction, Move) and read.isdisjoint(made):
            continue
        if isinstance(instruction, Region):
            bodies = tuple(map(drop_unread, instruction.bodies))
            if any(new is not old for new, old in zip(bodies, instruction.bodies, strict=True)):
                instruction = dataclasses.replace(instruction, bodies=bodies)
        read.difference_update(made)  # one that is made again is read from there on
        read.update(instruction.reads, copies_awaited(instruction))
        kept.append(instruction)
    if len(kept) == len(body.instructions) and all(
        a is b for a, b in zip(reversed(kept), body.instructions, strict=True)
    ):
        return body
    return dataclasses.replace(body, instructions=tuple(reversed(kept)))
