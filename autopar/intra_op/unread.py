"""Drops unread conversions: a reader may take a copy nearer than its hub's, which then has no reader.

In:     a sharded program.
Out:    the same without moves to copies that no instruction reads and that are no results. XLA drops them, too.
Method: one backward pass, which drops moves whose copy is not read later.
"""

from __future__ import annotations

import dataclasses

from autopar.intra_op.sharded import Body, Instruction, Move, with_bodies


def drop_unread(body: Body) -> Body:
    """Drop the unread conversions of a program, in loops and branches, too."""
    read = set(body.results)
    kept: list[Instruction] = []
    for instruction in reversed(body.instructions):
        made = instruction.makes
        if isinstance(instruction, Move) and read.isdisjoint(made):
            continue
        instruction = with_bodies(instruction, drop_unread)
        read.difference_update(made)  # a redefined copy: earlier definitions have other readers
        read.update(instruction.needs)
        kept.append(instruction)
    if len(kept) == len(body.instructions) and all(
        a is b for a, b in zip(reversed(kept), body.instructions, strict=True)
    ):
        return body
    return dataclasses.replace(body, instructions=tuple(reversed(kept)))
