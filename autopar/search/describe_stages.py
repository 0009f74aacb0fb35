"""A planned pipeline as a plan: what the user is told of it.

In:     `PipelinePlan`, and what it was made for.
Out:    `Plan`.
Method: where a value lies is where its buffers lie; costs are those of the simulated step.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from autopar.intra_op.sharded import Collective, describe
from autopar.ir.program import Program
from autopar.ir.trace.state import Roles
from autopar.mesh import Cluster, Sharding
from autopar.plan.decision import Cost, Stage, Submesh, Value
from autopar.plan.figures import Figures
from autopar.plan.fingerprint import fingerprints
from autopar.plan.profile import Profile
from autopar.plan.words import machine_text
from autopar.report.plan import Plan
from autopar.search.describe import role_of
from autopar.search.figures import figures_of
from autopar.search.methods import Method, method_text
from autopar.search.profile import profile_of_pipeline
from autopar.search.recompute import recomputed_by
from autopar.streams.assemble import PipelinePlan
from autopar.streams.clock import timeline_of


@dataclass(frozen=True, slots=True, eq=False)
class PipelineOrigin:
    """What a pipeline's plan came from: kept beside it in memory, for `explain` and for compiling."""

    program: Program
    roles: Roles
    cluster: Cluster
    method: Method
    pipeline: PipelinePlan


def describe_pipeline(
    program: Program,
    roles: Roles,
    cluster: Cluster,
    method: Method,
    pipeline: PipelinePlan,
    planning_seconds: float,
) -> Plan:
    """The plan of a pipeline.

    Args:
        program: The step.
        roles: Which inputs are state, batch, donated.
        cluster: The machine.
        method: What was asked for.
        pipeline: What was planned.
        planning_seconds: How long that took.
    """
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
    specs = [program.spec_of(k, spec) for k, spec in enumerate(specs)]
    cost = cost_of(pipeline, planning_seconds)
    profile = profile_of_pipeline(pipeline.cut.program, pipeline.cut.roles, cluster, pipeline)
    return Plan(
        name=program.name,
        method=method_text(method),
        stages=stages,
        num_microbatches=pipeline.cut.split.count,
        schedule=pipeline.schedule.name,
        shardings=program.in_containers(specs),
        cost=dataclasses.replace(cost, figures=_figures(program, roles, cluster, pipeline, cost, profile)),
        values=values,
        streams=pipeline.streams.instructions,
        alternatives=(),
        choices=(),
        fingerprints=fingerprints(program, cluster),
        machine=machine_text(cluster),
        microbatch_semantics=method.options().microbatch_semantics,
        parts=pipeline.cut.stacks.count,
        events=timeline_of(pipeline.streams, pipeline.simulation),
        budget_bytes=method.options().memory_budget_bytes or cluster.device.memory_bytes,
        profile=profile,
        origin=PipelineOrigin(program, roles, cluster, method, pipeline),
    )


def _figures(
    program: Program, roles: Roles, cluster: Cluster, pipeline: PipelinePlan, cost: Cost, profile: Profile
) -> Figures:
    count, meshes = pipeline.cut.split.count, [stage.mesh for stage in pipeline.stages]
    tasks = [task for stage in pipeline.stages for task in stage.tasks]
    hosts = [
        {(first + k) // cluster.devices_per_host: None for k in range(mesh.num_devices)}
        for mesh, first in zip(meshes, pipeline.first_device, strict=True)
    ]
    return figures_of(
        program,
        roles,
        cluster,
        [(task.body, count if task.task.is_in_loop else 1) for task in tasks],
        [(c, meshes[c.stage]) for c in cost.collectives],
        [(c.bytes, len(hosts[c.source] | hosts[c.target]) > 1) for c in profile.crossings],
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
    compute = communication = shown = 0.0
    exposed: list[float] = []
    collectives: list[Collective] = []
    for number, stage in enumerate(stages):
        for task in stage.tasks:
            times = count if task.task.is_in_loop else 1
            share = times * stage.mesh.num_devices / devices
            communication += share * task.communication_seconds
            shown += share * sum(task.exposed_seconds)
            compute += share * (task.seconds - sum(task.exposed_seconds))
            exposed += [times * e for e in task.exposed_seconds]
            collectives += [dataclasses.replace(c, times=c.times * times, stage=number) for c in task.collectives]
    seconds = pipeline.seconds
    return Cost(
        seconds,
        compute,
        communication,
        max(0.0, seconds - compute - shown),
        tuple(pipeline.simulation.peak_bytes[number % num_meshes] for number in range(len(stages))),
        max(_argument_bytes(pipeline, mesh) for mesh in range(num_meshes)),
        tuple(collectives),
        max(s.gap for s in stages),
        "optimal" if all(s.sharded.solution.status == "optimal" for s in stages) else "feasible",
        planning_seconds,
        tuple(exposed),
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
        sharding, mesh = found.get(k, (Sharding.replicated(len(var.aval.shape)), home.get(var, 0)))
        name = program.in_paths[k] if k < program.num_args else f"constant {k - program.num_args}"
        values.append(
            Value(name, role_of(program, roles, k), tuple(var.aval.shape), str(var.aval.dtype), sharding, mesh)
        )
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
