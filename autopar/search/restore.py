"""Attaches a plan that was read from a file to its step: its choices are lowered, nothing is solved.

In:     `Program`, its roles, cluster, method, `Plan`.
Out:    `Plan` with its origin, so that it can be compiled and explained.
Method: shardings, collectives and instructions of the lowered choices must equal those in the file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from autopar.errors import AutoparError, PlanFileError
from autopar.inter_op.cut import cut_step
from autopar.inter_op.stage_plan import lower_stage
from autopar.inter_op.stage_program import fused_program, stage_program
from autopar.inter_op.tasks import make_tasks
from autopar.intra_op.graph import Graph
from autopar.intra_op.restrict import Allowed, pin_constraints
from autopar.intra_op.sharded import Collective
from autopar.ir.program import Program
from autopar.ir.trace.state import Roles
from autopar.mesh import Cluster
from autopar.plan.decision import Value
from autopar.report.plan import Plan
from autopar.search.describe import describe_plan
from autopar.search.methods import Method, method_text
from autopar.search.offload import Offloaded, offloaded_program
from autopar.search.one_mesh import in_microbatches, restrict_plan
from autopar.search.padding import padded_program
from autopar.search.request import Request
from autopar.search.solve_stages import given_choices
from autopar.streams.assemble import StepPlan, assemble, assemble_step
from autopar.streams.schedules import find_schedule, splits_backward


def restore(program: Program, roles: Roles, cluster: Cluster, method: Method, plan: Plan) -> Plan:
    """Attach a plan read from a file to the program it was made for: lower its choices, solve nothing.

    If the plan was made by `method`, that decides which choices `explain` calls forbidden.

    Raises `PlanFileError`: the plan's choices do not give what its file lists: the file was edited.
    """
    _check_devices(cluster, plan)
    carry_out = _one_program if plan.is_one_program else _pipeline
    request = Request(program, roles, cluster, method)
    try:
        there = offloaded_program(program, roles, Offloaded(plan.offloaded, plan.offloaded_activations))
        planned = carry_out(request.of(padded_program(there, dict(plan.padded))), plan)
        fresh = describe_plan(request, planned, plan.cost.planning_seconds)
    except PlanFileError:
        raise
    except AutoparError as error:  # the program is the plan's, so the file was edited
        raise _not_these_choices(plan, f"{error.summary.rstrip('.')} ({error.wrong.rstrip('.')})") from error
    except AssertionError as error:
        raise _not_these_choices(plan, f"they fit no program: {error}") from error
    _check_same(plan, fresh)
    # Names contain source lines, which may have moved since.
    cost = dataclasses.replace(plan.cost, collectives=fresh.cost.collectives)
    return dataclasses.replace(plan, shardings=fresh.shardings, values=fresh.values, origin=fresh.origin, cost=cost)


def _check_devices(cluster: Cluster, plan: Plan) -> None:
    """Check that the devices of all stages exist."""
    for number, stage in enumerate(plan.stages):
        if stage.submesh.first + stage.submesh.num_devices > cluster.num_devices:
            where = f"stage {number} is on {stage.submesh.num_devices} devices from {stage.submesh.first}"
            raise _not_these_choices(plan, f"{where}, and there are {cluster.num_devices}")


def _one_program(request: Request, plan: Plan) -> StepPlan:
    """Restore a step on one mesh. Raises `AssertionError`: the choices are not those of this step."""
    mesh, roles = plan.mesh, request.roles
    how = plan.num_microbatches, plan.microbatch_semantics, request.cluster.num_devices
    step = in_microbatches(request.program, roles, *how)

    def restrict(graph: Graph, allowed: Allowed) -> None:
        if method_text(request.method) == plan.method:
            pin_constraints(graph, allowed)
            restrict_plan(request.of(step), mesh, graph, allowed)

    stage = fused_program(step, roles)
    sharded = given_choices(stage, request.cluster, plan.stages[0], plan.cost, restrict)
    return assemble_step(step, roles, plan.num_microbatches, sharded)


def _pipeline(request: Request, plan: Plan) -> StepPlan:
    """Restore a step cut into stages. Raises `AssertionError`: the choices are not those of this step."""
    cluster, schedule = request.cluster, getattr(request.method, "schedule", None)
    named = schedule if not isinstance(schedule, str | None) and schedule.name == plan.schedule else plan.schedule
    how = plan.parts, plan.num_microbatches, plan.microbatch_semantics
    cut = cut_step(request.program, request.roles, *how, num_devices=cluster.num_devices)
    borders = tuple(stage.layers[0] for stage in plan.stages)
    assert borders == tuple(sorted(set(borders))) and borders[0] == 0, "stages overlap"
    assert plan.stages[-1].layers[-1] < cut.chain.num_segments, "there are fewer layers"
    levels = [stage.recomputed.level for stage in plan.stages]
    tasks = make_tasks(cut, borders, splits_backward(find_schedule(named)), levels)
    stages = []
    for number, stage in enumerate(plan.stages):
        made = stage_program(tasks, number)
        sharded = given_choices(made, cluster, stage, plan.cost)
        stages.append(lower_stage(made, cluster.device, sharded))
    return assemble(tasks, stages, cluster, find_schedule(named))


def _check_same(plan: Plan, fresh: Plan) -> None:
    """Check that the choices give what the file lists."""
    for what, now, was in (
        ("shardings", _unnamed(fresh.values), _unnamed(plan.values)),
        ("collectives", _unnamed(fresh.cost.collectives), _unnamed(plan.cost.collectives)),
        ("instructions", list(fresh.streams.items()), list(plan.streams.items())),
        ("stages", [s.submesh for s in fresh.stages], [s.submesh for s in plan.stages]),
        ("layers", [s.layers for s in fresh.stages], [s.layers for s in plan.stages]),
    ):
        if now != was:
            raise _not_these_choices(plan, f"they give other {what} than it lists")


def _unnamed(entries: Sequence[Value | Collective]) -> list[Value | Collective]:
    return [
        dataclasses.replace(e, name="") if isinstance(e, Value) else dataclasses.replace(e, operation="")
        for e in entries
    ]


def _not_these_choices(plan: Plan, wrong: str) -> PlanFileError:
    return PlanFileError(
        "the plan's choices are not those of its step.",
        given=f"a plan of `{plan.name}` on {plan.mesh}",
        wrong=f"{wrong}: its file was edited, or written by another autopar.",
        do="plan again, step.plan(...), and save that.",
    )
