"""Assembles sharded stages into a planned step: emits the streams, checks and simulates them.

In:     a step cut into stages, each on its mesh, and the schedule; or a step that is one program.
Out:    `StepPlan`: everything that `Plan` shows and the runtimes execute; of several stages a `PipelinePlan`.
Method: emit instruction streams, check, simulate; the same again for another level of recomputation. A step on one mesh is
        one stage, whose stream runs one program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autopar._jax import Var
from autopar.grouping import grouped
from autopar.inter_op.cut import CutStep
from autopar.inter_op.equal_stages import lowered, take_over
from autopar.inter_op.placement import place_stages
from autopar.inter_op.residuals import CHEAP
from autopar.inter_op.stage_plan import StagePlan, TaskPlan, lower_stage
from autopar.inter_op.stage_program import fused_program, fused_stage, with_tasks
from autopar.inter_op.tasks import Tasks
from autopar.intra_op.read_off import Sharded
from autopar.ir.program import Program
from autopar.ir.split.layers.layers import LayerSplit, whole_stacks
from autopar.ir.trace.state import Roles
from autopar.mesh import ArrayType, Cluster, Sharding
from autopar.options import Goal
from autopar.streams.check import check_streams
from autopar.streams.clock import check_order, simulate_streams
from autopar.streams.emit import Emission, emit_instructions, emit_step
from autopar.streams.instructions import Run, Streams
from autopar.streams.schedules import Schedule, Step, in_rounds, num_chunks
from autopar.streams.simulate import Interval, Simulation

ONE_PROGRAM = "none"
"""The schedule's name for a step that is one program."""


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """A planned step.

    Attributes:
        program: The program that runs: the step, with its scans over layers split or its microbatches in a loop.
        roles: Roles of the program's inputs.
        stacks: How the arguments and results of the user's step map to those of the program.
        num_microbatches: Number of microbatches.
        home: For each argument, the stage that holds it.
        stages: The stages, each on its mesh.
        first_device: First device of each stage.
        streams: The instructions of each mesh.
        simulation: The simulated step.
    """

    program: Program
    roles: Roles
    stacks: LayerSplit
    num_microbatches: int
    home: Mapping[Var, int]
    stages: tuple[StagePlan, ...]
    first_device: tuple[int, ...]
    streams: Streams
    simulation: Simulation

    @property
    def seconds(self) -> float:
        """Predicted time of one step."""
        return self.simulation.seconds

    @property
    def gap(self) -> float:
        """The optimality gap of the worst stage."""
        return max(stage.gap for stage in self.stages)

    def times(self, task: TaskPlan) -> int:
        """How often a task runs in one step."""
        return self.num_microbatches if task.task.is_in_loop else 1

    def devices_of_stages(self, devices: Sequence[Any]) -> list[list[Any]]:
        """The devices of each stage; a single stage has all."""
        if len(self.stages) == 1:
            return [list(devices)]
        spans = zip(self.first_device, self.stages, strict=True)
        return [list(devices[first : first + stage.mesh.num_devices]) for first, stage in spans]

    @property
    def interval_seconds(self) -> float:
        """Predicted time between steps that do not wait for each other's results: the busy time of the busiest mesh."""
        return max(self.simulation.busy_seconds.values())

    def arguments_at_home(self) -> list[tuple[ArrayType, int]]:
        """The type and sharding in which each argument is held, and its stage; an unread argument is replicated."""
        read = grouped((k, self.streams.buffers[at]) for k, at in self.streams.arguments)
        found = []
        for k, var in enumerate(self.program.jaxpr.invars):
            home, shape = self.home.get(var, 0), tuple(var.aval.shape)
            # Prefer the whole argument to its microbatches, and its home stage to other readers.
            best = min(read.get(k, ()), key=lambda b: (b.value.kind == "piece", b.stage != home), default=None)
            if best is None:
                whole = Sharding.replicated(len(shape))
                found.append((ArrayType(shape, np.dtype(var.aval.dtype), whole, self.stages[home].mesh), home))
            else:
                found.append((replace(best.value.type, shape=shape), best.stage))
        return found

    def seconds_for(self, goal: Goal) -> float:
        """The seconds that a goal minimizes."""
        return self.seconds if goal == "step" else self.interval_seconds

    @property
    def schedule_name(self) -> str:
        """Name of the schedule."""
        return ONE_PROGRAM

    @property
    def layers(self) -> tuple[range, ...]:
        """The layers of each stage; a step that is one program is one layer."""
        return (range(1),)


@dataclass(frozen=True, slots=True, eq=False)
class PipelinePlan(StepPlan):
    """A planned step that is cut into stages.

    Attributes:
        tasks: The tasks of each stage.
        schedule: The order in which stages run them.
    """

    tasks: Tasks
    schedule: Schedule

    @property
    def cut(self) -> CutStep:
        """The step as a chain of segments, which the stages are cut from."""
        return self.tasks.cut

    @property
    def borders(self) -> tuple[int, ...]:
        """First segment of each stage."""
        return self.tasks.borders

    @property
    def schedule_name(self) -> str:
        """Name of the schedule."""
        return self.schedule.name

    @property
    def layers(self) -> tuple[range, ...]:
        """The segments of each stage."""
        ends = (*self.borders[1:], self.cut.chain.num_segments)
        return tuple(range(*span) for span in zip(self.borders, ends, strict=True))

    @property
    def waiting_share(self) -> float:
        """Fraction of the step that a device idles, averaged over devices."""
        busy = self.simulation.busy_seconds
        devices = {mesh: self.stages[mesh].mesh.num_devices for mesh in busy}
        return 1 - sum(busy[m] * devices[m] for m in busy) / (self.seconds * sum(devices.values()))

    @property
    def memory_binds(self) -> bool:
        """Whether memory made a stage recompute more, or constrained its sharding."""
        return any(level > CHEAP for level in self.tasks.levels) or any(s.sharded.problem.rows for s in self.stages)

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the fullest mesh, on one device."""
        return max(self.simulation.peak_bytes.values())


def assemble_step(program: Program, roles: Roles, num_microbatches: int, sharded: Sharded) -> StepPlan:
    """Plan a step on one mesh, its microbatches in a loop: one stage, whose stream runs one program."""
    stage = fused_stage(fused_program(program, roles), sharded)
    streams = emit_step(stage)
    check_streams(streams, 1)
    (run,) = streams.instructions[0]
    assert isinstance(run, Run)
    # The peak comes from the program's liveness: operands and results alone would not tell it.
    seconds = sharded.step_seconds
    simulation = Simulation(seconds, (Interval(0, 0.0, seconds, run),), {0: sharded.peak_bytes}, {0: seconds})
    stacks, home = whole_stacks(program.jaxpr), dict.fromkeys(program.jaxpr.invars, 0)
    return StepPlan(program, roles, stacks, num_microbatches, home, (stage,), (0,), streams, simulation)


def assemble(tasks: Tasks, stages: Sequence[StagePlan], cluster: Cluster, schedule: Schedule) -> PipelinePlan:
    """Plan a pipeline of planned stages: emit its streams, check and simulate them."""
    cut = tasks.cut
    _check_homes(tasks)
    order = steps_in_order(cut, len(stages) // num_chunks(schedule), schedule)
    state = [cut.program.jaxpr.invars[k] for k in cut.roles.state]
    check_order(order, schedule, tasks, len(stages))
    donated = {v for v, d in zip(cut.program.jaxpr.invars, cut.roles.donated, strict=True) if d}
    streams = emit_instructions(Emission(tasks, stages, order, state, donated))
    check_streams(streams, cut.split.count)
    of_mesh = place_stages([stage.mesh.num_devices for stage in stages[: len(order)]], cluster)
    first_device = [of_mesh[number % len(order)] for number in range(len(stages))]
    simulation = simulate_streams(streams, stages, first_device, cluster)
    return PipelinePlan(
        cut.program,
        cut.roles,
        cut.stacks,
        cut.split.count,
        tasks.update.home,
        tuple(stages),
        tuple(first_device),
        streams,
        simulation,
        tasks,
        schedule,
    )


def steps_in_order(cut: CutStep, num_meshes: int, schedule: Schedule) -> list[list[Step]]:
    """Each mesh's steps, in the schedule's order, round by round; all forward steps first in rounds where a join needs them."""
    waiting = {number // 2 for number in cut.after_pass.values() if number % 2 == 0}
    return in_rounds(schedule.order(num_meshes, cut.split.count), cut.chain.num_rounds, waiting)


def _check_homes(tasks: Tasks) -> None:
    """Assert that new state is at the stage of the old: otherwise every step would begin by moving it."""
    update = tasks.update
    for result, argument in tasks.cut.roles.aliases.items():
        home = update.home[tasks.jaxpr.invars[argument]]
        assert update.outputs[result] == home, f"new state {result} is at stage {update.outputs[result]}, not {home}"


def at_levels(planned: PipelinePlan, levels: Mapping[int, float], cluster: Cluster) -> PipelinePlan:
    """The same pipeline and shardings, with other levels of recomputation for some stages."""
    tasks, stages = planned.tasks, list(planned.stages)
    for number, level in levels.items():
        tasks = tasks.at_level(number, level)
    made: dict[tuple[int, float], StagePlan] = {}  # equal stages share one solution
    for number, level in levels.items():
        own, key = stages[number], (id(stages[number].sharded), level)
        if key in made:
            stages[number] = take_over(with_tasks(own.program, tasks), made[key], cluster.device)
            continue
        own = lowered(own, cluster.device)
        stages[number] = lower_stage(with_tasks(own.program, tasks), cluster.device, own.sharded)
        made[key] = stages[number]
    return assemble(tasks, stages, cluster, planned.schedule)


def all_lowered(planned: PipelinePlan, cluster: Cluster) -> PipelinePlan:
    """The same pipeline, ready to run: stages whose plan was copied from an equal stage are lowered over their own values."""
    if not any(stage.borrowed for stage in planned.stages):
        return planned
    stages = [lowered(stage, cluster.device) for stage in planned.stages]
    return assemble(planned.tasks, stages, cluster, planned.schedule)
