"""A step as instruction streams, one per mesh, with its buffers and programs.

In:     (data only; `emit.py` emits it.)
Out:    `Streams`, which `check.py` checks.
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
    """The value that a buffer holds; a value of the loop has one buffer per microbatch.

    Attributes:
        value: The value, its type and sharding.
        mesh: The mesh that holds it.
        stage: The stage that it belongs to.
        microbatch: Its microbatch; -1: none.
    """

    value: Placed
    mesh: MeshId
    stage: int
    microbatch: int


@dataclass(frozen=True, eq=False)
class Streams:
    """A step as instruction streams.

    Attributes:
        instructions: The stream of each mesh.
        buffers: The value in each buffer, by its id.
        arguments: (position of the argument, buffer that holds it, or a microbatch of it, when the step begins).
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
        """For each buffer, the kind and key of its value, and its microbatch."""
        return [(b.value.kind, b.value.key, b.microbatch) for b in self.buffers]

    @property
    def given(self) -> dict[MeshId, list[BufferId]]:
        """For each mesh, the buffers that are live when the step begins."""
        found: dict[MeshId, list[BufferId]] = {mesh: [] for mesh in self.instructions}
        for at in (*(at for _, at in self.arguments), *self.numbers):
            found[self.buffers[at].mesh].append(at)
        return found
