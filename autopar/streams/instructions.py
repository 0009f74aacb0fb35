"""A step as instruction streams over buffers, one per mesh.

In:     (types only; `emit.py` emits them.)
Out:    `Instruction = Run | Send | Recv | Free`; `Streams`, with its buffers and programs, which `check.py` checks.
Method: a buffer is written once. A message is one or more buffers from one mesh to another; its `Send` and its `Recv` have
        the same number. `Send` does not block; `Recv` does.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.inter_op.stage import SlotKind
from autopar.inter_op.stage_plan import Placed, TaskPlan

BufferId = int
MeshId = int


@dataclass(frozen=True, slots=True)
class Run:
    """Run a compiled program once: `inputs` are its operands, `outputs` its results, in order."""

    program: str
    stage: int
    microbatch: int
    inputs: tuple[BufferId, ...] = ()
    outputs: tuple[BufferId, ...] = ()

    def __str__(self) -> str:
        return f"run {self.program} (stage {self.stage}, microbatch {self.microbatch})"


@dataclass(frozen=True, slots=True)
class Send:
    """Send `buffers` to mesh `peer`, whose stream holds the `Recv` of this message."""

    buffers: tuple[BufferId, ...]
    peer: MeshId
    message: int

    def __str__(self) -> str:
        return f"send {_names(self.buffers)} -> mesh {self.peer}"


@dataclass(frozen=True, slots=True)
class Recv:
    """Wait for a message of mesh `peer`; its values become `buffers`."""

    buffers: tuple[BufferId, ...]
    peer: MeshId
    message: int

    def __str__(self) -> str:
        return f"receive {_names(self.buffers)} <- mesh {self.peer}"


@dataclass(frozen=True, slots=True)
class Free:
    """Release `buffers`, which nothing reads any more."""

    buffers: tuple[BufferId, ...]

    def __str__(self) -> str:
        return f"free {_names(self.buffers)}"


Instruction = Run | Send | Recv | Free


def _names(buffers: tuple[BufferId, ...]) -> str:
    return ", ".join(f"b{b}" for b in buffers)


def reads(instruction: Instruction) -> tuple[BufferId, ...]:
    """Buffers that an instruction reads."""
    match instruction:
        case Run(inputs=inputs):
            return inputs
        case Send(buffers):
            return buffers
    return ()


def writes(instruction: Instruction) -> tuple[BufferId, ...]:
    """Buffers that an instruction writes."""
    match instruction:
        case Run(outputs=outputs):
            return outputs
        case Recv(buffers):
            return buffers
    return ()


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
