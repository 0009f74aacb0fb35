"""Frees each buffer after its last reader, unless it is a result of the step.

In:     `Streams` without `Free`.
Out:    the same with `Free` instructions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from autopar.grouping import grouped
from autopar.streams.instructions import BufferId, Free, Instruction, Streams, reads, writes


def free(streams: Streams) -> Streams:
    """The streams with a `Free` of each buffer after its last reader."""
    kept = {at for at in streams.results if at is not None}
    instructions = {mesh: tuple(_with_frees(stream, kept)) for mesh, stream in streams.instructions.items()}
    return dataclasses.replace(streams, instructions=instructions)


def _with_frees(stream: Sequence[Instruction], kept: Collection[BufferId]) -> list[Instruction]:
    last = {buffer: k for k, instruction in enumerate(stream) for buffer in (*writes(instruction), *reads(instruction))}
    ending = grouped((k, buffer) for buffer, k in last.items() if buffer not in kept)
    found: list[Instruction] = []
    for k, instruction in enumerate(stream):
        found.append(instruction)
        if k in ending:
            found.append(Free(tuple(sorted(ending[k]))))
    return found
