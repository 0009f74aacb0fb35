"""Describes a planned step to the user, as a `Plan`.

In:     `StepPlan`, the request that it was made for.
Out:    `Plan`.
Method: shardings are those of the values' buffers, costs those of the simulated step, names the arguments' paths and the
        user's source lines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator

from autopar._jax import Var
from autopar.intra_op.held import held_values
from autopar.intra_op.sharded import Body, Collective, Compute, describe, instructions_within
from autopar.ir.program import Program
from autopar.ir.trace.state import Roles
from autopar.mesh import Cluster, Sharding
from autopar.plan.decision import Cost, Origin, Recomputed, Stage, Submesh, Value
from autopar.plan.stale import fingerprints
from autopar.plan.words import ArgumentRole, machine_text
from autopar.report.plan import Plan
from autopar.report.readers import describe_phase
from autopar.search.figures import figures_of
from autopar.search.methods import method_text
from autopar.search.profile import profile_of
from autopar.search.recompute import recomputed_by
from autopar.search.request import Request
from autopar.streams.assemble import PipelinePlan, StepPlan
from autopar.streams.clock import most_host_bytes, timeline_of


def describe_plan(request: Request, planned: StepPlan, planning_seconds: float) -> Plan:
    """The `Plan` of a planned step, which took `planning_seconds` to plan."""
    step, cluster, options = request.program, request.cluster, request.options
    values = tuple(_values(planned))
    by_name = {v.name: v for v in values}
    firsts = [parts[0] for parts in planned.stacks.inputs[: step.num_args]]
    specs = [by_name[planned.program.in_paths[at]].sharding.partition_spec() for at in firsts]
    cost, profile = cost_of(planned, cluster, planning_seconds), profile_of(planned, cluster)
    return Plan(
        name=step.name,
        method=method_text(request.method),
        stages=tuple(_stages(planned, cluster)),
        num_microbatches=planned.num_microbatches,
        microbatch_semantics=options.microbatch_semantics,
        schedule=planned.schedule_name,
        parts=planned.stacks.count,
        shardings=step.in_containers([step.spec_of(k, spec) for k, spec in enumerate(specs)]),
        cost=dataclasses.replace(cost, figures=figures_of(request, planned, cost.collectives, profile.crossings)),
        values=values,
        streams=planned.streams.instructions,
        events=timeline_of(planned.streams, planned.simulation),
        alternatives=(),
        fingerprints=fingerprints(step, cluster),
        machine=machine_text(cluster),
        budget_bytes=request.budget_bytes,
        profile=profile,
        origin=Origin(step, request.roles, cluster, options, planned),
    )


def _stages(planned: StepPlan, cluster: Cluster) -> Iterator[Stage]:
    for number, (stage, first, layers) in enumerate(
        zip(planned.stages, planned.first_device, planned.layers, strict=True)
    ):
        operations, recomputed = ("", ""), Recomputed()
        if isinstance(planned, PipelinePlan):
            eqns = planned.tasks.rounds[number][0].forward
            operations = (describe(eqns[0]), describe(eqns[-1])) if eqns else ("", "")
            recomputed = recomputed_by(planned, number, cluster.device)
        submesh = Submesh(stage.mesh.num_devices, first)
        made = stage.sharded
        yield Stage(submesh, stage.mesh, tuple(layers), made.choices, operations, recomputed, made.body.bucket)


def cost_of(planned: StepPlan, cluster: Cluster, planning_seconds: float) -> Cost:
    """The costs of a simulated step, averaged over all devices."""
    stages, simulation = planned.stages, planned.simulation
    num_meshes = len(planned.streams.instructions)
    devices = sum(s.mesh.num_devices for s in stages[:num_meshes])
    compute = communication = shown = 0.0
    exposed: list[float] = []
    collectives: list[Collective] = []
    for number, stage in enumerate(stages):
        for task in stage.tasks:
            times = planned.times(task)
            share = times * stage.mesh.num_devices / devices
            communication += share * task.communication_seconds
            compute += share * (task.seconds - sum(task.exposed_seconds))
            shown += share * sum(task.exposed_seconds)
            exposed += [times * e for e in task.exposed_seconds]
            collectives += [dataclasses.replace(c, times=c.times * times, stage=number) for c in task.collectives]
    busy, gap = simulation.busy_seconds, planned.gap
    idle = sum((planned.seconds - busy[mesh]) * stages[mesh].mesh.num_devices for mesh in range(num_meshes)) / devices
    # If devices share cores, idle ones lend theirs, and what is computed then is not idle time.
    idle = min(idle, planned.seconds - compute - shown)
    return Cost(
        planned.seconds,
        compute,
        communication,
        max(0.0, idle),
        tuple(simulation.peak_bytes[number % num_meshes] for number in range(len(stages))),
        max(_argument_bytes(planned, mesh) for mesh in range(num_meshes)),
        tuple(collectives),
        gap,
        "feasible" if gap else "optimal",
        planning_seconds,
        tuple(exposed),
        host_bytes=most_host_bytes(planned.streams, stages, planned.first_device, cluster),
    )


def _argument_bytes(planned: StepPlan, mesh: int) -> int:
    streams = planned.streams
    given = [streams.buffers[at] for _, at in streams.arguments]
    return sum(buffer.value.num_bytes for buffer in given if buffer.mesh == mesh)


def _values(planned: StepPlan) -> Iterator[Value]:
    program, roles, streams = planned.program, planned.roles, planned.streams
    for k, (kind, home) in enumerate(planned.arguments_at_home()):
        name = program.in_paths[k] if k < program.num_args else f"constant {k - program.num_args}"
        role, dtype = role_of(program, roles, k), str(program.jaxpr.invars[k].aval.dtype)
        yield Value(name, role, kind.shape, dtype, kind.sharding, home, kind.on_host)
    for k, result in enumerate(streams.results):
        if k not in roles.aliases and result is not None:
            buffer = streams.buffers[result]
            kind = buffer.value.type
            shape, dtype = kind.shape, str(kind.dtype)
            yield Value(program.out_paths[k], "result", shape, dtype, kind.sharding, buffer.stage, kind.on_host)
    for number, stage in enumerate(planned.stages):
        for task in stage.tasks:
            if task.task.kind == "step":
                returned = {atom for atom, _ in task.body.outputs if isinstance(atom, Var)}
                held = held_values(stage.sharded.graph).keys() - returned
                for name, var, sharding in _activations(task.body, held):
                    shape, dtype = tuple(var.aval.shape), str(var.aval.dtype)
                    yield Value(name, "activation", shape, dtype, sharding, number)


def _activations(body: Body, held: Container[Var]) -> Iterator[tuple[str, Var, Sharding]]:
    for i, _ in instructions_within(body):
        if isinstance(i, Compute) and (not i.rule.whole or i.rule.summed):
            for var, sharding in i.makes:
                if len(var.aval.shape) > 1 and var in held:
                    yield describe_phase(i.eqn), var, sharding


def role_of(program: Program, roles: Roles, k: int) -> ArgumentRole:
    """The role of an input of the flat program: state, batch, another argument, or a constant."""
    if k >= program.num_args:
        return "constant"
    return "state" if k in roles.state else "batch" if k in roles.batch else "argument"
