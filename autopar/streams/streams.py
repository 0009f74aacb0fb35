"""A step as instruction streams, one for each mesh, and what every buffer is.

In:     (data only; `emit.py` writes it.)
Out:    `Streams`; and the `Contract` that they are held to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.inter_op.stage_plan import Placed, TaskPlan
from autopar.streams.check import Contract
from autopar.streams.instructions import BufferId, Instruction, MeshId


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """What a buffer holds: a value that is somewhere, of some microbatch; there are as many as microbatches.

    Attributes:
        value: The value, its type and how it lies on the mesh.
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


def contract_of(streams: Streams, num_microbatches: int) -> Contract:
    """What the streams must keep, told from the programs and not from the streams."""
    number_key = next((streams.buffers[at].value.key for at in streams.numbers), None)

    def operands(name: str) -> list[tuple[str, object]]:
        plan = streams.programs[name]
        found = [(b.kind, b.key) for b in (*plan.inputs, *plan.written_rows)]
        return found + [("number", number_key)] * plan.needs_number

    given: dict[int, list[int]] = {mesh: [] for mesh in streams.instructions}
    for at in (*(at for _, at in streams.arguments), *streams.numbers):
        given[streams.buffers[at].mesh].append(at)
    runs = [
        (name, k)
        for name, plan in streams.programs.items()
        for k in range(num_microbatches if plan.task.is_in_loop else 1)
    ]
    return Contract(
        given,
        [at for at in streams.results if at is not None],
        {name: operands(name) for name in streams.programs},
        {name: [(b.kind, b.key) for b in plan.outputs] for name, plan in streams.programs.items()},
        [(b.value.kind, b.value.key, b.microbatch) for b in streams.buffers],
        [b.mesh for b in streams.buffers],
        runs,
        [b.value.num_bytes for b in streams.buffers],
    )
