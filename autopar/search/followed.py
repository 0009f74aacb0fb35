"""Plans a step on the pipeline of another step, whose state it takes in place: evaluation or inference beside training.

In:     a traced step, the plan it follows, which of its arguments are state of that step.
Out:    `PipelinePlan` on the same submeshes and logical meshes.
Method: scans over layers are split into as many parts as in the other step. Borders are chosen by dynamic programming for
        the fewest bytes of state read by another stage than its own, ties for the fewest bytes that cross. Each stage is
        sharded with its state pinned to the present sharding. Without a backward pass the schedule is "inference".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from autopar._jax import Var
from autopar.errors import BatchError, MicrobatchError, PipelineError
from autopar.inter_op.borders import cheapest
from autopar.inter_op.cut import CutStep, cut_step
from autopar.inter_op.stage_program import stage_program
from autopar.inter_op.tasks import make_tasks
from autopar.ir.dataflow import ancestors, inputs_of
from autopar.ir.work import num_bytes
from autopar.mesh import Sharding
from autopar.search.methods import Follow
from autopar.search.pins import restrict_stages
from autopar.search.pipeline import check_budget
from autopar.search.progress import Report, silent
from autopar.search.request import Request
from autopar.search.solve_stages import Solved, Terms, pinned, solve_stage
from autopar.streams.assemble import PipelinePlan, assemble
from autopar.streams.schedules import SCHEDULES, num_chunks, splits_backward

Homes = Mapping[Var, tuple[int, Sharding]]
"""Argument that is state of the other step -> its stage and sharding."""


def pipeline_behind(request: Request, method: Follow, report: Report = silent) -> PipelinePlan:
    """Plan a step on another step's pipeline.

    Raises:
        PipelineError: The step has fewer segments than there are stages.
        InfeasibleError: A stage does not fit.
    """
    lead, program, cluster = _lead(method), request.program, request.cluster
    there = {path: k for k, path in enumerate(method.plan.attached.program.in_paths)}
    found = {k: there[method.paths[path]] for k, path in enumerate(program.in_paths) if path in method.paths}
    num_stages = len(lead.stages)
    cut = _cut(request, method, found)
    if num_stages > cut.chain.num_segments:
        raise PipelineError(
            "the step cannot follow so many stages.",
            given=f"`{program.name}` behind a pipeline of {num_stages} stages",
            wrong=f"its forward pass has {cut.chain.num_segments} operations that a stage could begin with.",
            do="parallelize it by itself: its state is moved to where it wants it.",
            num_stages=num_stages,
        )
    homes = _homes(cut, method, found)
    borders = aligned_borders(cut, homes, num_stages)
    report(f"sharding {program.name} behind {method.plan.name}, {num_stages} stages")
    forward_only = not any(cut.chain.backward) and num_chunks(lead.schedule) == 1
    schedule = SCHEDULES["inference"] if forward_only else lead.schedule
    tasks = make_tasks(cut, borders, splits_backward(schedule))
    stages, terms = [], Terms(cluster, request.options, Solved())
    keep_keys = restrict_stages(cut, {})
    for number, like in enumerate(lead.stages):
        stage = stage_program(tasks, number)
        pins = {at: homes[var][1] for at, var in stage.arguments.items() if var in homes and homes[var][0] == number}
        further, key = keep_keys(stage, like.mesh)
        restrict = pinned(pins, further, f"`{method.plan.name}` keeps it so")
        stages.append(solve_stage(stage, like.mesh, terms, restrict, (tuple(pins.items()), key)))
    planned = assemble(tasks, stages, cluster, schedule)
    check_budget(planned, request.budget_bytes)
    return planned


def _lead(method: Follow) -> PipelinePlan:
    """The pipeline that is followed."""
    lead = method.plan.attached.pipeline
    assert isinstance(lead, PipelinePlan), "a step that follows one program is one program"
    return lead


def _cut(request: Request, method: Follow, found: Mapping[int, int]) -> CutStep:
    """The step cut as the other one is: its stacks alike, and as many microbatches if that is possible."""
    lead = _lead(method)
    program = request.program
    kept = dataclasses.replace(request.roles, state=tuple(sorted({*request.roles.state, *found})))
    count, spread = request.most_microbatches(lead.cut.split.count), request.cluster.num_devices
    stacks, semantics = lead.cut.stacks, method.microbatch_semantics
    in_parts = {here: there for here, there in found.items() if len(stacks.inputs[there]) > 1}
    layout = stacks.count, stacks.length, {here: stacks.input_dims[there] for here, there in in_parts.items()}
    if count > 1 and request.roles.batch:
        try:
            return cut_step(program, kept, len(lead.stages), count, semantics, layout, spread)
        except (BatchError, MicrobatchError):  # such as a metric over pairs of samples: the whole batch at once
            pass
    return cut_step(program, kept, len(lead.stages), 1, semantics, layout, spread)


def _homes(cut: CutStep, method: Follow, found: Mapping[int, int]) -> dict[Var, tuple[int, Sharding]]:
    lead, values = _lead(method).cut, method.plan.values
    homes = {}
    for here, there in found.items():
        mine, theirs = cut.stacks.inputs[here], lead.stacks.inputs[there]
        if len(mine) == len(theirs):  # else this step reads a stack as a whole: it is assembled for it
            for a, b in zip(mine, theirs, strict=True):
                homes[cut.program.jaxpr.invars[a]] = values[b].stage, values[b].sharding
    return homes


def aligned_borders(cut: CutStep, homes: Homes, num_stages: int) -> tuple[int, ...]:
    """First segment of each stage: the fewest bytes of state read by another stage, then the fewest that cross."""
    away = _bytes_away(cut, homes, num_stages)
    return tuple(cheapest(1j * cut.chain.cut_bytes[:-1], lambda end: away[:, [end]] - away[:, :end], num_stages)[1])


def _bytes_away(cut: CutStep, homes: Homes, num_stages: int) -> np.ndarray:
    """`[stage, end]`: bytes of the state that the segments before `end` read and that is on other stages."""
    split, chain = cut.split, cut.chain
    made_by = {var: eqn for eqn in split.before for var in eqn.outvars}
    read: list[dict[Var, None]] = [{} for _ in range(chain.num_segments)]
    for eqn, segment in zip(chain.loop.eqns, chain.segment, strict=True):
        outside = split.read_outside([eqn]) if segment >= 0 else ()
        behind = ancestors(outside, lambda var: inputs_of(made_by[var]) if var in made_by else ())
        read[segment].update((var, None) for var in behind if var in homes and var not in made_by)
    away = [[sum(num_bytes(v) for v in own if homes[v][0] != stage) for own in read] for stage in range(num_stages)]
    return np.pad(np.cumsum(away, axis=1), ((0, 0), (1, 0)))
