"""The pipelines that a method asks for, and the plan of one.

In:     a traced step, a method that fixes stages.
Out:    `Plan`.
Method: `PipelineParallel` and `ThreeD` fix the number of stages and their submeshes; borders are where the work is
        balanced and little is sent, or where the user's `mark_stage` stands.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax

from autopar.errors import DeviceCountError, NotBuiltYetError, PipelineError
from autopar.inter_op.chain import balanced_borders
from autopar.inter_op.stage_plan import lower_stage
from autopar.inter_op.stage_program import StageProgram, stage_program
from autopar.inter_op.tasks import make_tasks
from autopar.intra_op.graph import Graph
from autopar.intra_op.restrict import Allowed, Restrict, restrict_to_axes
from autopar.intra_op.sharded import Collective, describe
from autopar.ir.flatten import is_recomputed
from autopar.ir.source import is_backward
from autopar.ir.state import Roles
from autopar.ir.trace import Program
from autopar.mesh import Cluster, LogicalMesh, Sharding, logical_meshes
from autopar.plan.assemble import PipelinePlan, assemble
from autopar.plan.clock import timeline_of
from autopar.plan.cut import Cut, check_stage_count, cut_step
from autopar.plan.methods import Method, PipelineParallel, ThreeD
from autopar.plan.pipeline import plan_pipeline
from autopar.plan.plan import Cost, Plan, Stage, Submesh, Value
from autopar.plan.recompute import recomputed_by
from autopar.plan.schedules import find_schedule, num_chunks, splits_backward
from autopar.plan.solve_stages import Solved, given_choices

Report = Callable[[str], None]
MICROBATCHES_PER_STAGE = 4


@dataclass(frozen=True, slots=True, eq=False)
class PipelineOrigin:
    """What a pipeline's plan came from: kept beside it in memory, for compiling."""

    program: Program
    roles: Roles
    cluster: Cluster
    method: Method
    pipeline: PipelinePlan


def pipeline_of(
    program: Program,
    roles: Roles,
    cluster: Cluster,
    method: PipelineParallel | ThreeD,
    report: Report = lambda text: None,
) -> PipelinePlan:
    """Plan the pipeline that a method asks for.

    Raises:
        DeviceCountError: The devices do not divide into the stages.
        PipelineError: The step has fewer places to cut.
        InfeasibleError: A stage does not fit.
    """
    if cluster.groups:
        raise NotBuiltYetError(
            "stages on several kinds of devices are not built yet.",
            given=str(cluster),
            wrong="this version gives every stage devices of one kind.",
            do="plan for one of the kinds: " + ", ".join(f'Cluster.of("{group}")' for group in cluster.groups) + ".",
            feature="heterogeneous clusters",
        )
    options = method.options()
    schedule = find_schedule(method.schedule)
    if isinstance(method, PipelineParallel):
        marked = _marked_stages(program, num_chunks(schedule))
        num_stages = method.num_stages or (len(method.submeshes) if method.submeshes else marked) or 0
        if num_stages == 0:
            raise PipelineError(
                "how many stages is not said.",
                given="PipelineParallel() and no autopar.mark_stage in the step",
                wrong="neither says where to cut.",
                do="pass num_stages=....",
                num_stages=0,
            )
    else:
        num_stages = method.pipeline
    num_stages *= num_chunks(schedule)
    sizes = _submesh_sizes(method, num_stages // num_chunks(schedule), cluster) * num_chunks(schedule)
    count = method.num_microbatches or default_microbatches(program, roles, num_stages // num_chunks(schedule))
    report(f"cutting {program.name} into {num_stages} stages, {count} microbatches")
    cut = cut_step(program, roles, num_stages, count, options.microbatch_semantics)
    check_stage_count(cut, num_stages)
    if isinstance(method, PipelineParallel) and not (method.num_stages or method.submeshes):
        _check_marks(cut, num_stages)
    borders = balanced_borders(cut.chain, num_stages)
    meshes = [_meshes(method, cluster, size) for size in sizes]

    def restrict(stage: StageProgram, mesh: LogicalMesh) -> Restrict | None:
        return _three_d(stage) if isinstance(method, ThreeD) else None

    return plan_pipeline(cut, borders, meshes, cluster, schedule, options, Solved(), restrict)


def default_microbatches(program: Program, roles: Roles, num_stages: int) -> int:
    """Four for each stage, or the most below that which divide the batch."""
    sizes = [program.in_avals[k].shape[0] for k in roles.batch]
    wanted = MICROBATCHES_PER_STAGE * num_stages if num_stages > 1 else 1
    return next((m for m in range(wanted, 0, -1) if all(size % m == 0 for size in sizes)), 1)


def _marked_stages(program: Program, chunks: int) -> int:
    """How many stages, of so many chunks each, the marks make; 0: there are none.

    Raises:
        PipelineError: The chunks do not make whole stages.
    """
    marks = sum(
        eqn.primitive.name == "mark_stage" and not is_backward(eqn) and not is_recomputed(eqn)
        for eqn in program.jaxpr.eqns
    )
    if marks and (marks + 1) % chunks:
        raise PipelineError(
            "the marks do not make whole stages.",
            given=f"{marks} autopar.mark_stage in the step, a schedule with {chunks} chunks on each stage",
            wrong=f"{marks + 1} chunks do not divide into stages of {chunks}.",
            do="add or drop a mark, or use another number of chunks.",
            num_stages=0,
        )
    return (marks + 1) // chunks if marks else 0


def _check_marks(cut: Cut, num_stages: int) -> None:
    """Every mark must be a place between stages.

    Raises:
        PipelineError: One is not.
    """
    found = len(cut.chain.marks) + 1
    if found != num_stages:
        raise PipelineError(
            "not every mark stands between two stages.",
            given=f"{num_stages - 1} autopar.mark_stage in the step",
            wrong=f"only {found - 1} of them mark a value that one layer hands to the next: a mark on a parameter, on the "
            "last value, or twice at one place is none.",
            do="mark the activations between layers, or pass num_stages=....",
            num_stages=num_stages,
        )


def _submesh_sizes(method: PipelineParallel | ThreeD, num_stages: int, cluster: Cluster) -> list[int]:
    if isinstance(method, ThreeD):
        sizes = [method.data * method.tensor] * num_stages
        text = f"ThreeD(data={method.data}, tensor={method.tensor}, pipeline={method.pipeline})"
    else:
        sizes = list(method.submeshes or [cluster.num_devices // num_stages] * num_stages)
        text = f"PipelineParallel(num_stages={num_stages}, submeshes={method.submeshes})"
    if sum(sizes) != cluster.num_devices or min(sizes) < 1:
        raise DeviceCountError(
            "the stages do not fit the cluster.",
            given=f"{text} for {cluster.num_devices} devices",
            wrong=f"they take {sum(sizes)} devices.",
            do="choose numbers whose product (or sum, of submeshes) is the number of devices.",
            wanted=sum(sizes),
            available=cluster.num_devices,
        )
    return sizes


def _meshes(method: PipelineParallel | ThreeD, cluster: Cluster, size: int) -> list[LogicalMesh]:
    if isinstance(method, ThreeD):
        inner = cluster.intra
        outer = cluster.intra if method.data * method.tensor <= cluster.devices_per_host else cluster.inter
        if method.tensor > cluster.devices_per_host:
            inner = cluster.inter
        return [LogicalMesh((method.data, method.tensor), axis_names=("data", "tensor"), links=(outer, inner))]
    return logical_meshes(cluster, size)


def _three_d(stage: StageProgram) -> Restrict:
    def restrict(graph: Graph, allowed: Allowed) -> None:
        restrict_to_axes(graph, allowed, "data", list(stage.aliases.values()))

    return restrict


def describe_pipeline(
    program: Program,
    roles: Roles,
    cluster: Cluster,
    method: Method,
    pipeline: PipelinePlan,
    started: float,
    method_text: str,
    machine: str,
    fingerprints: dict[str, str],
) -> Plan:
    """The plan of a pipeline."""
    stages = tuple(
        Stage(
            Submesh(stage.mesh.num_devices, first),
            stage.mesh,
            tuple(range(*span)),
            stage.sharded.choices,
            _operations(pipeline, number),
            recomputed_by(pipeline, number, cluster.device),
        )
        for number, (stage, first, span) in enumerate(
            zip(pipeline.stages, pipeline.first_device, _spans(pipeline), strict=True)
        )
    )
    values = tuple(_values(pipeline.cut.program, pipeline.cut.roles, pipeline))
    by_name = {v.name: v for v in values}
    firsts = [parts[0] for parts in pipeline.cut.stacks.inputs[: program.num_args]]
    specs = [by_name[pipeline.cut.program.in_paths[at]].sharding.partition_spec() for at in firsts]
    return Plan(
        name=program.name,
        method=method_text,
        stages=stages,
        num_microbatches=pipeline.cut.split.count,
        schedule=pipeline.schedule.name,
        shardings=jax.tree.unflatten(program.in_tree, specs),
        cost=cost_of(pipeline, time.perf_counter() - started),
        values=values,
        streams=pipeline.streams.instructions,
        alternatives=(),
        choices=(),
        fingerprints=fingerprints,
        machine=machine,
        microbatch_semantics=method.options().microbatch_semantics,
        events=timeline_of(pipeline.streams, pipeline.simulation),
        budget_bytes=method.options().memory_budget_bytes or cluster.device.memory_bytes,
        origin=PipelineOrigin(program, roles, cluster, method, pipeline),
    )


def _spans(pipeline: PipelinePlan) -> list[tuple[int, int]]:
    ends = (*pipeline.borders[1:], pipeline.cut.chain.num_segments)
    return list(zip(pipeline.borders, ends, strict=True))


def _operations(pipeline: PipelinePlan, stage: int) -> tuple[str, str]:
    eqns = pipeline.tasks.forward[stage]
    return (describe(eqns[0]), describe(eqns[-1])) if eqns else ("", "")


def cost_of(pipeline: PipelinePlan, planning_seconds: float) -> Cost:
    """What the simulation says of a step, on average over all devices."""
    stages, count = pipeline.stages, pipeline.cut.split.count
    num_meshes = len(pipeline.streams.instructions)
    devices = sum(s.mesh.num_devices for s in stages[:num_meshes])
    compute = communication = 0.0
    collectives: list[Collective] = []
    for number, stage in enumerate(stages):
        for task in stage.tasks:
            times = count if task.task.kind in ("F", "B", "W") else 1
            share = times * stage.mesh.num_devices / devices
            communication += share * task.communication_seconds
            compute += share * (task.seconds - task.communication_seconds)
            collectives += [dataclasses.replace(c, times=c.times * times, stage=number) for c in task.collectives]
    seconds = pipeline.seconds
    return Cost(
        seconds,
        compute,
        communication,
        max(0.0, seconds - compute - communication),
        tuple(pipeline.simulation.peak_bytes[number % num_meshes] for number in range(len(stages))),
        max(_argument_bytes(pipeline, mesh) for mesh in range(num_meshes)),
        tuple(collectives),
        max(s.sharded.solution.gap for s in stages),
        "optimal" if all(s.sharded.solution.status == "optimal" for s in stages) else "feasible",
        planning_seconds,
    )


def _argument_bytes(pipeline: PipelinePlan, mesh: int) -> int:
    streams = pipeline.streams
    given = (*streams.arguments.values(), *streams.pieces.values())
    return sum(streams.buffers[at].num_bytes for at in given if streams.buffers[at].mesh == mesh)


def _values(program: Program, roles: Roles, pipeline: PipelinePlan) -> list[Value]:
    position = {var: k for k, var in enumerate(program.jaxpr.invars)}
    home = pipeline.tasks.update.home
    streams = pipeline.streams
    found: dict[int, tuple[Sharding, int]] = {}
    for (var, mesh), at in (*streams.arguments.items(), *streams.pieces.items()):
        k = position[var]
        if k not in found or mesh == home.get(var):
            found[k] = streams.buffers[at].border.sharding, mesh
    values = []
    for k, var in enumerate(program.jaxpr.invars):
        role = (
            "constant"
            if k >= program.num_args
            else "state"
            if k in roles.state
            else "batch"
            if k in roles.batch
            else "argument"
        )
        sharding, mesh = found.get(k, (Sharding.replicated(len(var.aval.shape)), home.get(var, 0)))
        name = program.in_paths[k] if k < program.num_args else f"constant {k - program.num_args}"
        values.append(Value(name, role, tuple(var.aval.shape), str(var.aval.dtype), sharding, mesh))
    for k, result in enumerate(streams.results):
        if k not in roles.aliases and result is not None:
            buffer = streams.buffers[result]
            values.append(
                Value(
                    program.out_paths[k],
                    "result",
                    buffer.border.shape,
                    str(buffer.border.dtype),
                    buffer.border.sharding,
                    buffer.stage,
                )
            )
    return values


def restore_pipeline(program: Program, roles: Roles, cluster: Cluster, method: Method, plan: Plan) -> PipelinePlan:
    """The pipeline of a plan read from a file: its borders and choices, nothing is solved.

    Raises:
        AssertionError: The choices are not those of this step.
    """
    schedule = getattr(method, "schedule", None)
    named = schedule if not isinstance(schedule, str | None) and schedule.name == plan.schedule else plan.schedule
    cut = cut_step(program, roles, len(plan.stages), plan.num_microbatches, plan.microbatch_semantics)
    borders = tuple(stage.layers[0] for stage in plan.stages)
    assert borders == tuple(sorted(set(borders))) and borders[0] == 0, "stages overlap"
    assert plan.stages[-1].layers[-1] < cut.chain.num_segments, "there are fewer layers"
    levels = [stage.recomputed.level for stage in plan.stages]
    splits = splits_backward(find_schedule(named))
    tasks = make_tasks(cut.program.jaxpr, cut.split, cut.chain, borders, splits, levels)
    stages = []
    for number, stage in enumerate(plan.stages):
        made = stage_program(tasks, number, cut.roles.aliases, cut.batch.dims)
        sharded = given_choices(made, stage.logical_mesh, cluster, stage.choices, plan.cost)
        stages.append(lower_stage(made, stage.logical_mesh, cluster.device, sharded))
    return assemble(cut, borders, tasks, stages, cluster, find_schedule(named))


def stage_devices(pipeline: PipelinePlan, devices: Sequence[jax.Device]) -> list[list[jax.Device]]:
    """The devices of each stage."""
    return [
        list(devices[first : first + stage.mesh.num_devices])
        for stage, first in zip(pipeline.stages, pipeline.first_device, strict=True)
    ]
