"""Emits instruction streams from stages and a schedule.

In:     the stages' tasks on their meshes, the order of their steps.
Out:    `Streams` (`instructions.py`): the instructions of each mesh, and the value in each buffer.
Method: each mesh runs its tasks in the schedule's order. After a task, all its results that another stage reads are sent in
        one message, which the reader receives before its first task that reads any of them. Then the other passes of `EMIT`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autopar._jax import Var
from autopar.grouping import grouped
from autopar.inter_op.stage import PER_MICROBATCH, SENT, Slot, TaskKind
from autopar.inter_op.stage_plan import Placed, StagePlan, TaskPlan, placed
from autopar.inter_op.tasks import Tasks
from autopar.ir.passes import Pass, run_passes
from autopar.mesh import Sharding
from autopar.streams.check import check_streams
from autopar.streams.instructions import Buffer, BufferId, Free, Instruction, MeshId, Recv, Run, Send, Streams
from autopar.streams.lifetimes import free, overwrite
from autopar.streams.schedules import Step


def emit_instructions(given: Emission) -> Streams:
    """Emit the streams, by the passes of `EMIT`."""
    return run_passes(EMIT, given, check_emission).streams


@dataclass(frozen=True, slots=True, eq=False)
class Emission:
    """The form that the passes of `EMIT` work on.

    Attributes:
        tasks: The step cut into stages.
        stages: Each on its mesh; stage s is on mesh s modulo the number of meshes.
        order: Steps per mesh; chunk c of mesh i is stage c times the number of meshes plus i.
        state: Arguments that the step returns anew: each is held by one stage, which sends it to the others that read it.
        donated: Arguments whose memory new values may take.
        streams: The streams so far.
    """

    tasks: Tasks
    stages: Sequence[StagePlan]
    order: Sequence[Sequence[Step]]
    state: Sequence[Var]
    donated: Collection[Var] = ()
    streams: Streams = Streams({}, (), (), (), (), {}, {})

    def to(self, streams: Streams) -> Emission:
        """The form with other streams."""
        return dataclasses.replace(self, streams=streams)


def check_emission(emission: Emission) -> None:
    """Check the streams; before the pass that frees buffers, as they will be after it."""
    streams = emission.streams
    if not any(isinstance(i, Free) for stream in streams.instructions.values() for i in stream):
        streams = free(streams)
    check_streams(streams, emission.tasks.split.count)


EMIT: tuple[Pass[Emission], ...] = (
    Pass(
        "emit",
        "each mesh runs its tasks in the schedule's order; messages arrive before their first reader",
        lambda e: e.to(_Emitter(e).emit()),
    ),
    Pass(
        "overwrite",
        "results take the memory of operands that nothing reads later",
        lambda e: e.to(overwrite(e.streams, e.donated)),
    ),
    Pass("free", "every buffer is freed after its last reader", lambda e: e.to(free(e.streams))),
)
"""The passes for a step that is cut into stages; a step that is one program needs none (`emit_step`)."""


def emit_step(stage: StagePlan) -> Streams:
    """The streams of a step that is one stage with one task, from all arguments to all results in order."""
    (plan,), num_inputs = stage.tasks, len(stage.program.jaxpr.invars)
    buffers = tuple(Buffer(value, 0, 0, -1) for value in (*plan.inputs, *plan.outputs))
    inputs, outputs = tuple(range(num_inputs)), tuple(range(num_inputs, len(buffers)))
    name = plan.task.name
    return Streams(
        instructions={0: (Run(name, 0, 0, inputs, outputs),)},
        buffers=buffers,
        arguments=tuple((at, at) for at in inputs),
        numbers=(),
        results=outputs,
        programs={name: plan},
        overwritten={name: tuple(at for at, taken in enumerate(stage.program.donated) if taken)},
    )


_Event = tuple[TaskPlan, int]
"""A run to be emitted: a task, and its microbatch (-1: none)."""
_Name = tuple[str, Any, int]
"""A value: its slot's kind and key, and its microbatch (-1: none)."""


@dataclass(frozen=True, slots=True, eq=False)
class _Message:
    """Values that a run makes and another stage reads.

    Attributes:
        source: The mesh that sends it.
        made_at: Position of the run among those of that mesh.
        stage: The stage that reads it.
        read_at: Position of its first reader among the runs of that stage's mesh.
        values: The values, as their reader wants them.
    """

    source: MeshId
    made_at: int
    stage: int
    read_at: int
    values: dict[_Name, Placed]


class _Emitter:
    def __init__(self, given: Emission):
        self.tasks, self.stages, self.order = given.tasks, given.stages, given.order
        self.state, self.num_meshes = dict.fromkeys(given.state), len(given.order)
        self.buffers: list[Buffer] = []
        self.buffer_of: dict[tuple[int, str, Any, int], BufferId] = {}
        self.streams: dict[MeshId, list[Instruction]] = {mesh: [] for mesh in range(self.num_meshes)}
        self.arguments: dict[tuple[Var, int], BufferId] = {}
        self.pieces: dict[tuple[Var, int], BufferId] = {}
        self.numbers: list[BufferId] = []
        self.message = 0

    def mesh_of(self, stage: int) -> MeshId:
        return stage % self.num_meshes

    def emit(self) -> Streams:
        events = [self.events(mesh) for mesh in range(self.num_meshes)]
        messages = self.find_messages(events)
        self.send_arguments(events)
        self.run_all(events, messages)
        self.unread_state()
        results, position = self.results(), {var: k for k, var in enumerate(self.tasks.jaxpr.invars)}
        return Streams(
            {mesh: tuple(stream) for mesh, stream in self.streams.items()},
            tuple(self.buffers),
            tuple((position[var], at) for (var, _), at in (*self.arguments.items(), *self.pieces.items())),
            tuple(self.numbers),
            results,
            {t.task.name: t for stage in self.stages for t in stage.tasks},
            {},
        )

    def find_messages(self, events: Sequence[Sequence[_Event]]) -> list[_Message]:
        """What stages send each other: from each run to each other stage that reads results of it, one message."""
        maker: dict[_Name, tuple[MeshId, int]] = {}
        own_values: list[set[_Name]] = [set() for _ in self.stages]
        for mesh, own in enumerate(events):
            for at, (plan, microbatch) in enumerate(own):
                made = [self.name(value, microbatch) for value in plan.outputs if value.kind in SENT]
                own_values[plan.task.stage].update(made)
                for name in made:
                    maker.setdefault(name, (mesh, at))
        found: dict[tuple[MeshId, int, int], _Message] = {}
        for own in events:
            for at, (plan, microbatch) in enumerate(own):
                stage = plan.task.stage
                for value in plan.inputs:
                    name = self.name(value, microbatch)
                    if value.kind in SENT and name not in own_values[stage]:
                        source, made_at = maker[name]
                        message = found.setdefault((source, made_at, stage), _Message(source, made_at, stage, at, {}))
                        message.values.setdefault(name, value)
        return list(found.values())

    def run_all(self, events: Sequence[Sequence[_Event]], messages: Sequence[_Message]) -> None:
        """Emit the runs; before each, what it reads first arrives, and after it, its results leave."""
        numbered = list(enumerate(messages, self.message))
        arriving = grouped(((self.mesh_of(m.stage), m.read_at), (number, m)) for number, m in numbered)
        leaving = grouped(((m.source, m.made_at), (number, m)) for number, m in numbered)
        for mesh, own in enumerate(events):
            for at, (plan, microbatch) in enumerate(own):
                for number, message in arriving.get((mesh, at), ()):
                    received = [self.new(value, message.stage, name[2]) for name, value in message.values.items()]
                    self.streams[mesh].append(Recv(tuple(received), message.source, number))
                self.run(plan, microbatch, mesh)
                for number, message in leaving.get((mesh, at), ()):
                    buffers = tuple(self.buffer_of[(plan.task.stage, *name)] for name in message.values)
                    self.streams[mesh].append(Send(buffers, self.mesh_of(message.stage), number))

    def events(self, mesh: MeshId) -> list[_Event]:
        """The runs of a mesh, in order."""
        own = range(mesh, len(self.stages), self.num_meshes)
        inits = (self.stages[stage].task("init") for stage in own)
        found: list[_Event] = [(task, -1) for task in inits if task is not None]
        between = self.joining(own, "M")
        for step in self.order[mesh]:
            number = 2 * step.round + (step.kind != "F")
            while between and between[0][0].task.after_pass < number:
                found.append(between.pop(0))
            task = self.stages[step.chunk * self.num_meshes + mesh].task(step.kind, step.round)
            if task is not None:
                found.append((task, step.microbatch))
        return [*found, *between, *self.joining(own, "U")]

    def joining(self, own: Iterable[int], kind: TaskKind) -> list[_Event]:
        """The runs of the stages' tasks of a kind that is not per microbatch, round by round."""
        tasks = [t for stage in own for t in self.stages[stage].tasks if t.task.kind == kind]
        return [(t, -1) for t in sorted(tasks, key=lambda t: (t.task.after_pass, t.task.round))]

    def name(self, slot: Slot, microbatch: int) -> _Name:
        return slot.kind, slot.key, microbatch if slot.kind in PER_MICROBATCH else -1

    def new(self, value: Placed, stage: int, microbatch: int) -> BufferId:
        """A new buffer, in which readers find the value from now on."""
        self.buffers.append(Buffer(value, self.mesh_of(stage), stage, microbatch))
        at = len(self.buffers) - 1
        self.buffer_of[(stage, *self.name(value, microbatch))] = at
        return at

    def run(self, task: TaskPlan, microbatch: int, mesh: MeshId) -> None:
        stage = task.task.stage
        inputs = [self.operand(value, stage, microbatch) for value in task.inputs]
        # Rows are written in place, so the task reads them too.
        inputs += [self.buffer_of[(stage, *self.name(b, microbatch))] for b in task.written_rows]
        if task.needs_number:
            inputs.append(self.number(stage, microbatch))
        outputs = [self.new(value, stage, microbatch) for value in task.outputs]
        self.streams[mesh].append(Run(task.task.name, stage, max(microbatch, 0), tuple(inputs), tuple(outputs)))

    def number(self, stage: int, microbatch: int) -> BufferId:
        """The buffer that holds the number of a microbatch."""
        var = self.tasks.split.number
        key = (stage, "number", var, microbatch)
        if key not in self.buffer_of:
            self.numbers.append(self.new(self.untouched(Slot("number", var, var), stage), stage, microbatch))
        return self.buffer_of[key]

    def operand(self, value: Placed, stage: int, microbatch: int) -> BufferId:
        key = (stage, *self.name(value, microbatch))
        if key not in self.buffer_of:
            at = self.new(value, stage, key[3])
            match value.kind:
                case "argument":
                    self.arguments[value.key, stage] = at
                case "piece":
                    outer = {inner: var for var, inner in self.stages[stage].program.stacks.values()}
                    self.pieces[outer[value.key], stage] = at
                case "number":
                    self.numbers.append(at)
                case kind:
                    raise AssertionError(f"{kind} {value.key} is read by stage {stage} before it is there")
        return self.buffer_of[key]

    def send_arguments(self, events: Sequence[Sequence[_Event]]) -> None:
        """Send state that other stages read from its home stage, in one message per reader."""
        home = self.tasks.update.home
        wanted: dict[tuple[int, int], dict[Var, Placed]] = {}
        for own in events:
            for plan, _ in own:
                for value in plan.inputs:
                    var = value.key
                    if value.kind == "argument" and var in self.state and home[var] != plan.task.stage:
                        wanted.setdefault((home[var], plan.task.stage), {})[var] = value
        for (source, stage), values in wanted.items():
            sent = []
            for var, value in values.items():
                if (source, "argument", var, -1) not in self.buffer_of:
                    self.arguments[var, source] = self.new(self.value_at_home(var, source) or value, source, -1)
                sent.append(self.buffer_of[source, "argument", var, -1])
            self.streams[self.mesh_of(source)].append(Send(tuple(sent), self.mesh_of(stage), self.message))
            received = [self.new(value, stage, -1) for value in values.values()]
            self.streams[self.mesh_of(stage)].append(Recv(tuple(received), self.mesh_of(source), self.message))
            self.message += 1

    def untouched(self, slot: Slot, stage: int) -> Placed:
        """A value that no equation reads, replicated."""
        aval = slot.key.aval
        sharding = Sharding.replicated(len(aval.shape))
        return placed(slot, sharding, aval.shape, aval.dtype, self.stages[stage].mesh)

    def value_at_home(self, var: Var, stage: int) -> Placed | None:
        """An argument in its sharding at a stage; None: it is not among the stage's arguments."""
        plan = self.stages[stage]
        at = next((at for at, argument in plan.program.arguments.items() if argument is var), None)
        if at is None:
            return None
        sharding = plan.sharded.input_sharding(at)
        return placed(Slot("argument", var, var), sharding, var.aval.shape, var.aval.dtype, plan.mesh)

    def unread_state(self) -> None:
        """Add buffers for old state that its stage does not read, sharded as the new state."""
        for stage, plan in enumerate(self.stages):
            for at in plan.program.aliases.values():
                var = plan.program.arguments[at]
                value = self.value_at_home(var, stage)
                if value is not None and (stage, "argument", var, -1) not in self.buffer_of:
                    self.arguments[var, stage] = self.new(value, stage, -1)

    def results(self) -> tuple[BufferId | None, ...]:
        """The buffer of each result; None: it is a literal."""
        found: list[BufferId | None] = []
        update = self.tasks.update
        for k, atom in enumerate(self.tasks.jaxpr.outvars):
            stage = update.outputs[k]
            if hasattr(atom, "val"):
                found.append(None)
                continue
            at = self.buffer_of.get((stage, "value", atom, -1))
            if at is None:
                at = self.arguments.get((atom, stage))
            if at is None and (stage, "argument", atom, -1) not in self.buffer_of:
                # An argument that nothing reads is returned as it is.
                at = self.new(self.untouched(Slot("argument", atom, atom), stage), stage, -1)
                self.arguments[atom, stage] = at
            found.append(at)
        return tuple(found)
