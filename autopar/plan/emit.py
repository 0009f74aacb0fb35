"""From stages and a schedule to instruction streams.

In:     the stages' tasks on their meshes, the order of their steps.
Out:    `Streams`: per mesh its instructions, and what every buffer is.
Method: each mesh runs its tasks in the schedule's order. After a task everything that another mesh reads of it is sent
        there in one message, which the reader receives before its first task that reads any of it. A buffer is let go
        of after its last reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar._jax import Var
from autopar.inter_op.stage_plan import Border, StagePlan, TaskPlan
from autopar.inter_op.stage_program import Slot
from autopar.inter_op.tasks import Tasks
from autopar.mesh import Sharding
from autopar.plan.instructions import BufferId, Free, Instruction, MeshId, Recv, Run, Send, reads, writes
from autopar.plan.schedules import Step


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """What a buffer holds.

    Attributes:
        key: The value's variable.
        kind: As of `Slot`.
        mesh: Where it is.
        sharding: How it lies there.
        num_bytes: On one device.
        microbatch: Of which; -1: of none.
        shape: Global shape of the array.
        dtype: Its element type.
    """

    key: Any
    kind: str
    mesh: MeshId
    sharding: Sharding
    num_bytes: int
    microbatch: int
    shape: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True, eq=False)
class Streams:
    """A step as instructions.

    Attributes:
        instructions: Per mesh.
        buffers: What each buffer is.
        arguments: Buffers that hold arguments when the step begins: (argument's variable, mesh) -> buffer.
        pieces: The same for batch arguments in pieces.
        numbers: (mesh, microbatch) -> buffer of the microbatch's number.
        results: For each result of the step its buffer; None: it is a constant.
        programs: Program name -> its task.
    """

    instructions: Mapping[MeshId, tuple[Instruction, ...]]
    buffers: tuple[Buffer, ...]
    arguments: Mapping[tuple[Var, MeshId], BufferId]
    pieces: Mapping[tuple[Var, MeshId], BufferId]
    numbers: Mapping[tuple[MeshId, int], BufferId]
    results: tuple[BufferId | None, ...]
    programs: Mapping[str, TaskPlan]


def emit_instructions(
    tasks: Tasks, stages: Sequence[StagePlan], order: Sequence[Sequence[Step]], state: Sequence[Var]
) -> Streams:
    """Write the streams.

    Args:
        tasks: The step cut into stages.
        stages: Each on its mesh; mesh i is stage i's.
        order: Steps per stage.
        state: Arguments that come back: they live at one stage, which sends them to the others that read them.
    """
    return _Emitter(tasks, stages, order, state).emit()


@dataclass(frozen=True, slots=True)
class _Event:
    """A run to be emitted."""

    task: TaskPlan
    microbatch: int


class _Emitter:
    def __init__(
        self, tasks: Tasks, stages: Sequence[StagePlan], order: Sequence[Sequence[Step]], state: Sequence[Var]
    ):
        self.tasks, self.stages, self.order, self.state = tasks, stages, order, dict.fromkeys(state)
        self.buffers: list[Buffer] = []
        self.held: dict[tuple[MeshId, str, Any, int], BufferId] = {}
        self.streams: dict[MeshId, list[Instruction]] = {s: [] for s in range(len(stages))}
        self.arguments: dict[tuple[Var, MeshId], BufferId] = {}
        self.pieces: dict[tuple[Var, MeshId], BufferId] = {}
        self.numbers: dict[tuple[MeshId, int], BufferId] = {}
        self.message = 0

    def emit(self) -> Streams:
        events = [self.events(s) for s in range(len(self.stages))]
        # Who makes what, and who reads it: messages are known before anything is written.
        maker: dict[tuple[str, Any, int], tuple[MeshId, int]] = {}
        for mesh, own in enumerate(events):
            for at, event in enumerate(own):
                for border in event.task.outputs:
                    if border.slot.kind in ("loop", "value"):
                        maker.setdefault(self.name(border.slot, event.microbatch), (mesh, at))
        wanted: dict[tuple[MeshId, int, MeshId], dict[tuple[str, Any, int], Border]] = {}
        first_read: dict[tuple[MeshId, int, MeshId], int] = {}
        for mesh, own in enumerate(events):
            made_here = {
                self.name(b.slot, e.microbatch) for e in own for b in e.task.outputs if b.slot.kind in ("loop", "value")
            }
            for at, event in enumerate(own):
                for border in event.task.inputs:
                    name = self.name(border.slot, event.microbatch)
                    if border.slot.kind in ("loop", "value") and name not in made_here:
                        source, made_by = maker[name]
                        channel = source, made_by, mesh
                        wanted.setdefault(channel, {}).setdefault(name, border)
                        first_read.setdefault(channel, at)
        self.send_arguments(events)
        numbers: dict[tuple[MeshId, int, MeshId], int] = {}
        for channel in wanted:
            numbers[channel] = self.message
            self.message += 1
        for mesh, own in enumerate(events):
            arriving: dict[int, list[tuple[MeshId, int, MeshId]]] = {}
            for channel, at in first_read.items():
                if channel[2] == mesh:
                    arriving.setdefault(at, []).append(channel)
            for at, event in enumerate(own):
                for channel in arriving.get(at, ()):
                    received = [self.new(border, mesh, name[2]) for name, border in wanted[channel].items()]
                    self.streams[mesh].append(Recv(tuple(received), channel[0], numbers[channel]))
                self.run(event, mesh)
                for channel in wanted:
                    if channel[:2] == (mesh, at):
                        buffers = tuple(self.held[(mesh, *name)] for name in wanted[channel])
                        self.streams[mesh].append(Send(buffers, channel[2], numbers[channel]))
        results = self.results()
        kept = {b for b in results if b is not None}
        return Streams(
            {mesh: tuple(_with_frees(stream, kept)) for mesh, stream in self.streams.items()},
            tuple(self.buffers),
            self.arguments,
            self.pieces,
            self.numbers,
            results,
            {t.task.name: t for stage in self.stages for t in stage.tasks},
        )

    def events(self, stage: int) -> list[_Event]:
        """The runs of a stage, in order."""
        plan = self.stages[stage]
        by_kind = {kind: plan.task(kind) for kind in ("init", "F", "B", "W")}
        found = [_Event(by_kind["init"], -1)] if by_kind["init"] is not None else []
        for step in self.order[stage]:
            task = by_kind.get(step.kind)
            if task is not None:
                found.append(_Event(task, step.microbatch))
        return found + [_Event(t, -1) for t in plan.tasks if t.task.kind == "U"]

    def name(self, slot: Slot, microbatch: int) -> tuple[str, Any, int]:
        return slot.kind, slot.key, microbatch if slot.kind in ("loop", "number") else -1

    def new(self, border: Border, mesh: MeshId, microbatch: int) -> BufferId:
        """A new buffer, which holds the value from now on."""
        slot = border.slot
        count = self.stages[mesh].program.count
        aval = slot.var.aval if slot.kind == "sum" and hasattr(slot.var, "aval") else slot.key.aval
        shape = tuple(aval.shape)
        if slot.kind == "piece":
            shape = (count, *shape)
        elif slot.kind == "rows":
            share = self.stages[mesh].program.shares[slot.key]
            shape = (count, *(n // count if d == share.dim else n for d, n in enumerate(shape)))  # type: ignore[union-attr]
        self.buffers.append(
            Buffer(slot.key, slot.kind, mesh, border.sharding, border.num_bytes, microbatch, shape, aval.dtype)
        )
        at = len(self.buffers) - 1
        self.held[(mesh, *self.name(slot, microbatch))] = at
        return at

    def run(self, event: _Event, mesh: MeshId) -> None:
        task, microbatch = event.task, event.microbatch
        inputs = [self.operand(border, mesh, microbatch) for border in task.inputs]
        # Rows are written in place: the task reads them too.
        inputs += [self.held[(mesh, *self.name(b.slot, microbatch))] for b in task.written_rows]
        if task.needs_number:
            inputs.append(self.number(mesh, microbatch))
        outputs = [self.new(border, mesh, microbatch) for border in task.outputs]
        self.streams[mesh].append(Run(task.task.name, mesh, max(microbatch, 0), tuple(inputs), tuple(outputs)))

    def number(self, mesh: MeshId, microbatch: int) -> BufferId:
        """The buffer that holds the number of a microbatch."""
        key = (mesh, "number", self.tasks.split.loop.invars[0], microbatch)
        if key not in self.held:
            var = self.tasks.split.loop.invars[0]
            at = self.new(Border(Slot("number", var, var), Sharding(()), 4), mesh, microbatch)
            self.numbers[mesh, microbatch] = at
        return self.held[key]

    def operand(self, border: Border, mesh: MeshId, microbatch: int) -> BufferId:
        key = (mesh, *self.name(border.slot, microbatch))
        if key not in self.held:
            at = self.new(border, mesh, key[3])
            match border.slot.kind:
                case "argument":
                    self.arguments[border.slot.key, mesh] = at
                case "piece":
                    outer = {inner: var for var, inner in self.stages[mesh].program.stacks.values()}
                    self.pieces[outer[border.slot.key], mesh] = at
                case "number":
                    self.numbers[mesh, microbatch] = at
                case kind:
                    raise AssertionError(f"{kind} {border.slot.key} is read on mesh {mesh} before it is there")
        return self.held[key]

    def send_arguments(self, events: Sequence[Sequence[_Event]]) -> None:
        """State that several stages read is sent from where it lives, one message for each reader."""
        home = self.tasks.update.home
        wanted: dict[tuple[MeshId, MeshId], dict[Var, Border]] = {}
        for mesh, own in enumerate(events):
            for event in own:
                for border in event.task.inputs:
                    var = border.slot.key
                    if border.slot.kind == "argument" and var in self.state and home[var] != mesh:
                        wanted.setdefault((home[var], mesh), {})[var] = border
        for (source, mesh), values in wanted.items():
            sent = []
            for var, border in values.items():
                if (source, "argument", var, -1) not in self.held:
                    own_border = self.border_at_home(var, source) or border
                    self.arguments[var, source] = self.new(own_border, source, -1)
                sent.append(self.held[source, "argument", var, -1])
            self.streams[source].append(Send(tuple(sent), mesh, self.message))
            received = [self.new(border, mesh, -1) for border in values.values()]
            self.streams[mesh].append(Recv(tuple(received), source, self.message))
            self.message += 1

    def border_at_home(self, var: Var, mesh: MeshId) -> Border | None:
        for task in self.stages[mesh].tasks:
            for border in task.inputs:
                if border.slot.kind == "argument" and border.slot.key is var:
                    return border
        return None

    def results(self) -> tuple[BufferId | None, ...]:
        found: list[BufferId | None] = []
        update = self.tasks.update
        for k, atom in enumerate(self.tasks.jaxpr.outvars):
            mesh = update.outputs[k]
            if hasattr(atom, "val"):
                found.append(None)
                continue
            at = self.held.get((mesh, "value", atom, -1))
            if at is None:
                at = self.arguments.get((atom, mesh))
            found.append(at)
        return tuple(found)


def _with_frees(stream: Sequence[Instruction], kept: set[BufferId]) -> list[Instruction]:
    """The stream, with every buffer let go of after its last reader."""
    last: dict[BufferId, int] = {}
    for k, instruction in enumerate(stream):
        for buffer in (*writes(instruction), *reads(instruction)):
            last[buffer] = k
    ending: dict[int, list[BufferId]] = {}
    for buffer, k in last.items():
        if buffer not in kept:
            ending.setdefault(k, []).append(buffer)
    found: list[Instruction] = []
    for k, instruction in enumerate(stream):
        found.append(instruction)
        if k in ending:
            found.append(Free(tuple(sorted(ending[k]))))
    return found
