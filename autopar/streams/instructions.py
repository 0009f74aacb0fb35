"""The instructions that a mesh executes in one step, over buffers.

In:     (types only; `emit.py` emits them.)
Out:    `Instruction = Run | Send | Recv | Free`.
Method: a buffer is written once. A message is one or more buffers from one mesh to another; its `Send` and its `Recv` have
        the same number. `Send` does not block; `Recv` does.
"""

from __future__ import annotations

from dataclasses import dataclass

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
