"""Planning a pipeline: from a traced step, a number of stages and a schedule to stages, streams and a prediction.

In:     `Program`, its roles, the cluster, what is fixed (borders, submeshes, logical meshes, microbatches, schedule).
Out:    `PipelinePlan`: everything that `Plan` reads off and the runtime carries out.
Method: phases, segments, tasks, one program per stage, each sharded on its own logical mesh (equal stages once), streams,
        checker, simulator. Stages whose microbatches in flight do not fit run more of their forward pass again: the least
        that makes them fit; how they are sharded stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import InfeasibleError
from autopar.inter_op.backward import find_levels
from autopar.inter_op.residuals import CHEAP
from autopar.inter_op.stage_plan import StagePlan, lower_stage
from autopar.inter_op.stage_program import StageProgram, stage_program, with_tasks
from autopar.inter_op.tasks import Tasks, make_tasks
from autopar.intra_op.restrict import Restrict
from autopar.mesh import Cluster, LogicalMesh
from autopar.options import Options
from autopar.plan.check import check_streams
from autopar.plan.clock import check_order, contract_of, simulate_streams
from autopar.plan.cut import Cut
from autopar.plan.emit import Streams, emit_instructions
from autopar.plan.schedules import Schedule, num_chunks, splits_backward
from autopar.plan.simulate import Simulation
from autopar.plan.solve_stages import SameStacks, Solved, best_stage, pinned, solve_stage


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

    cut: Cut
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


def plan_pipeline(
    cut: Cut,
    borders: Sequence[int],
    meshes: Sequence[Sequence[LogicalMesh]],
    cluster: Cluster,
    schedule: Schedule,
    options: Options,
    solved: Solved,
    restrict: Callable[[StageProgram, LogicalMesh], Restrict | None] = lambda program, mesh: None,
) -> PipelinePlan:
    """Plan a pipeline whose borders and submeshes are given.

    Args:
        cut: The step in phases.
        borders: First segment of each stage.
        meshes: Per stage, the logical meshes to try; the cheapest is taken.
        cluster: The machine; stages take its devices in order.
        schedule: In which order stages work.
        options: Solver, time limit, memory budget.
        solved: Stages solved before; extended.
        restrict: Forbids choices of a stage on a mesh.

    Raises:
        InfeasibleError: A stage does not fit; says which and by how much.
    """
    levels = options.recompute_levels(len(borders))
    tasks = make_tasks(cut.program.jaxpr, cut.split, cut.chain, borders, splits_backward(schedule), levels or ())
    stages: list[StagePlan] = []
    same = SameStacks(cut)
    for number, candidates in enumerate(meshes):
        program = stage_program(tasks, number, cut.roles.aliases, cut.batch.dims)
        made = best_stage(program, candidates, cluster, options, solved, restrict)
        pins = same.pins(program, made)
        if pins:
            restriction = pinned(pins, restrict(program, made.mesh))
            made = solve_stage(program, made.mesh, cluster, options, solved, restriction, tuple(pins.items()))
        same.add(program, made)
        stages.append(made)
    planned = assemble(cut, tuple(borders), tasks, stages, cluster, schedule)
    budget = options.memory_budget_bytes or cluster.device.memory_bytes
    fitting = planned if levels else _run_again_what_does_not_fit(planned, cluster, budget)
    _check_budget(fitting, budget)
    return fitting


def assemble(
    cut: Cut,
    borders: tuple[int, ...],
    tasks: Tasks,
    stages: Sequence[StagePlan],
    cluster: Cluster,
    schedule: Schedule,
) -> PipelinePlan:
    """Streams, checked and simulated, of stages that are planned."""
    order = schedule.order(len(stages) // num_chunks(schedule), cut.split.count)
    state = [cut.program.jaxpr.invars[k] for k in cut.roles.state]
    check_order(order, schedule, tasks, len(stages))
    donated = {v for v, d in zip(cut.program.jaxpr.invars, cut.roles.donated, strict=True) if d}
    streams = emit_instructions(tasks, stages, order, state, donated)
    check_streams(streams.instructions, contract_of(streams, cut.split.count))
    num_meshes, first_device, at = len(order), [], 0
    for stage in stages[:num_meshes]:
        first_device.append(at)
        at += stage.mesh.num_devices
    first_device = [first_device[number % num_meshes] for number in range(len(stages))]
    simulation = simulate_streams(streams, stages, first_device, cluster)
    return PipelinePlan(cut, borders, tasks, tuple(stages), tuple(first_device), schedule, streams, simulation)


def at_levels(planned: PipelinePlan, levels: Mapping[int, float], cluster: Cluster) -> PipelinePlan:
    """The same pipeline, sharded alike, with some stages running more or less again."""
    tasks, stages = planned.tasks, list(planned.stages)
    for number, level in levels.items():
        tasks = tasks.at_level(number, level)
    for number in levels:
        program = with_tasks(stages[number].program, tasks)
        stages[number] = lower_stage(program, stages[number].mesh, cluster.device, stages[number].sharded)
    return assemble(planned.cut, planned.borders, tasks, stages, cluster, planned.schedule)


def _run_again_what_does_not_fit(planned: PipelinePlan, cluster: Cluster, budget: float) -> PipelinePlan:
    """Levels of recomputation are raised where the microbatches in flight do not fit, until they do.

    Returns:
        The pipeline that fits; where none does, that in which the largest peak is least.
    """
    num_meshes, least = len(planned.streams.instructions), planned
    ladders: dict[int, list[float]] = {}
    while True:
        raised: dict[int, float] = {}
        for mesh, peak in planned.simulation.peak_bytes.items():
            own = range(mesh, len(planned.stages), num_meshes)
            if peak > budget:
                ladders |= {s: list(find_levels(planned.tasks.passes[s])[1:]) for s in own if s not in ladders}
                left = [s for s in own if ladders[s]]
                if not left:
                    return least
                stage = min(left, key=lambda s: (planned.tasks.levels[s], s))
                raised[stage] = ladders[stage].pop(0)
        if not raised:
            return planned
        planned = at_levels(planned, raised, cluster)
        least = min(least, planned, key=lambda p: max(p.simulation.peak_bytes.values()))


def _check_budget(planned: PipelinePlan, budget: float) -> None:
    mesh, peak = max(planned.simulation.peak_bytes.items(), key=lambda item: item[1])
    if peak > budget:
        count, levels = len(planned.stages), set(planned.tasks.levels)
        again = "" if levels == {CHEAP} else ", however much of its forward pass the backward runs again"
        raise InfeasibleError(
            "a stage does not fit the memory budget.",
            given=f"stage {mesh} of {count} on {planned.stages[mesh].mesh}, schedule {planned.schedule.name!r}, "
            f"{planned.cut.split.count} microbatches, {budget:.0f} bytes on each device",
            wrong=f"{peak} bytes are alive on a device at once{again}.",
            do="use more stages or devices, more microbatches, or the schedule '1f1b'.",
            budget_bytes=int(budget),
            needed_bytes=int(peak),
        )
