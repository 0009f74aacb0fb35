"""A pipeline whose stages are sharded, put together: streams, checked and on the clock.

In:     a step cut into stages, each on its mesh; the schedule.
Out:    `PipelinePlan`: everything that `Plan` reads off and the runtime carries out.
Method: instruction streams, checker, simulator. Another level of recomputation needs nothing but that again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.inter_op.cut import CutStep
from autopar.inter_op.equal_stages import lowered, take_over
from autopar.inter_op.placement import place_stages
from autopar.inter_op.stage_plan import StagePlan, lower_stage
from autopar.inter_op.stage_program import with_tasks
from autopar.inter_op.tasks import Tasks
from autopar.mesh import Cluster
from autopar.streams.check import check_streams
from autopar.streams.clock import check_order, contract_of, simulate_streams
from autopar.streams.emit import Streams, emit_instructions
from autopar.streams.schedules import Schedule, num_chunks
from autopar.streams.simulate import Simulation


@dataclass(frozen=True, slots=True, eq=False)
class PipelinePlan:
    """A pipeline that is planned.

    Attributes:
        cut: What was cut.
        borders: First segment of each stage.
        tasks: The step cut into stages.
        stages: Each on its mesh.
        first_device: Of each stage.
        schedule: In which order they work.
        streams: What each mesh does.
        simulation: On the clock.
    """

    cut: CutStep
    borders: tuple[int, ...]
    tasks: Tasks
    stages: tuple[StagePlan, ...]
    first_device: tuple[int, ...]
    schedule: Schedule
    streams: Streams
    simulation: Simulation

    @property
    def seconds(self) -> float:
        """Predicted time of one step."""
        return self.simulation.seconds

    @property
    def waiting_share(self) -> float:
        """Part of the step that a device waits, on average over the devices."""
        busy = self.simulation.busy_seconds
        devices = {mesh: self.stages[mesh].mesh.num_devices for mesh in busy}
        return 1 - sum(busy[m] * devices[m] for m in busy) / (self.seconds * sum(devices.values()))

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the fullest mesh, on one device."""
        return max(self.simulation.peak_bytes.values())


def assemble(
    cut: CutStep,
    borders: tuple[int, ...],
    tasks: Tasks,
    stages: Sequence[StagePlan],
    cluster: Cluster,
    schedule: Schedule,
) -> PipelinePlan:
    """Streams, checked and simulated, of stages that are planned."""
    _check_homes(cut, tasks)
    order = schedule.order(len(stages) // num_chunks(schedule), cut.split.count)
    state = [cut.program.jaxpr.invars[k] for k in cut.roles.state]
    check_order(order, schedule, tasks, len(stages))
    donated = {v for v, d in zip(cut.program.jaxpr.invars, cut.roles.donated, strict=True) if d}
    streams = emit_instructions(tasks, stages, order, state, donated)
    check_streams(streams.instructions, contract_of(streams, cut.split.count))
    of_mesh = place_stages([stage.mesh.num_devices for stage in stages[: len(order)]], cluster)
    first_device = [of_mesh[number % len(order)] for number in range(len(stages))]
    simulation = simulate_streams(streams, stages, first_device, cluster)
    return PipelinePlan(cut, borders, tasks, tuple(stages), tuple(first_device), schedule, streams, simulation)


def _check_homes(cut: CutStep, tasks: Tasks) -> None:
    """New state is found where the old lives: otherwise every step would begin by moving it."""
    update = tasks.update
    for result, argument in cut.roles.aliases.items():
        home = update.home[cut.program.jaxpr.invars[argument]]
        assert update.outputs[result] == home, f"new state {result} is at stage {update.outputs[result]}, not {home}"


def at_levels(planned: PipelinePlan, levels: Mapping[int, float], cluster: Cluster) -> PipelinePlan:
    """The same pipeline, sharded alike, with some stages running more or less again."""
    tasks, stages = planned.tasks, list(planned.stages)
    for number, level in levels.items():
        tasks = tasks.at_level(number, level)
    made: dict[tuple[int, float], StagePlan] = {}  # equal stages share what was solved
    for number, level in levels.items():
        own, key = stages[number], (id(stages[number].sharded), level)
        if key in made:
            stages[number] = take_over(with_tasks(own.program, tasks), made[key], cluster.device)
            continue
        own = lowered(own, cluster.device)
        stages[number] = lower_stage(with_tasks(own.program, tasks), own.mesh, cluster.device, own.sharded)
        made[key] = stages[number]
    return assemble(planned.cut, planned.borders, tasks, stages, cluster, planned.schedule)


def all_lowered(planned: PipelinePlan, cluster: Cluster) -> PipelinePlan:
    """The same pipeline, ready to run: what its stages took over from equal ones is in their own values."""
    if not any(stage.borrowed for stage in planned.stages):
        return planned
    stages = [lowered(stage, cluster.device) for stage in planned.stages]
    return assemble(planned.cut, planned.borders, planned.tasks, stages, cluster, planned.schedule)
