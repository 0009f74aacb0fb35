"""A step as instruction streams, one for each mesh, and what every buffer is.

In:     (data only; `emit.py` writes it.)
Out:    `Streams`, which `check.py` holds to what it says of programs and buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.inter_op.stage import SlotKind
from autopar.inter_op.stage_plan import Placed, TaskPlan
from autopar.streams.instructions import BufferId, Instruction, MeshId


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """What a buffer holds: a value that is somewhere, of some microbatch; there are as many as microbatches.

    Attributes:
        value: The value, its type and sharding.
        mesh: Where it is.
        stage: Whose it is.
        microbatch: Of which; -1: of none.
    """

    value: Placed
    mesh: MeshId
    stage: int
    microbatch: int


@dataclass(frozen=True, eq=False)
class Streams:
    """A step as instructions.

    Attributes:
        instructions: Per mesh.
        buffers: What each buffer is.
        arguments: What holds arguments when the step begins, whole or in pieces: (position of the argument, buffer).
        numbers: Buffers that hold the number of their microbatch.
        results: For each result of the step its buffer; None: it is a constant.
        programs: Program name -> its task.
        overwritten: Program name -> positions of the operands whose memory its results take.
    """

    instructions: Mapping[MeshId, tuple[Instruction, ...]]
    buffers: tuple[Buffer, ...]
    arguments: tuple[tuple[int, BufferId], ...]
    numbers: tuple[BufferId, ...]
    results: tuple[BufferId | None, ...]
    programs: Mapping[str, TaskPlan]
    overwritten: Mapping[str, tuple[int, ...]]

    @functools.cached_property
    def names(self) -> list[tuple[SlotKind, object, int]]:
        """Of each buffer what it holds: kind and key of the value, of which microbatch."""
        return [(b.value.kind, b.value.key, b.microbatch) for b in self.buffers]

    @property
    def given(self) -> dict[MeshId, list[BufferId]]:
        """Of each mesh the buffers that are there when the step begins."""
        found: dict[MeshId, list[BufferId]] = {mesh: [] for mesh in self.instructions}
        for at in (*(at for _, at in self.arguments), *self.numbers):
            found[self.buffers[at].mesh].append(at)
        return found
