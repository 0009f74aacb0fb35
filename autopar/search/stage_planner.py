"""Plans the pipeline that a method asks for.

In:     a traced step, a method that fixes stages (`PipelineParallel`, `ThreeD`).
Out:    `PipelinePlan`.
Method: the method fixes the number of stages and their submeshes; borders are chosen so that stages are balanced and little
        is sent, or at the user's `mark_stage`s.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial

from autopar.errors import (
    AutoparError,
    BatchError,
    DeviceCountError,
    InfeasibleError,
    MicrobatchError,
    PipelineError,
    warn,
)
from autopar.inter_op.cut import CutStep, check_stage_count, cut_step
from autopar.inter_op.stage import StageProgram
from autopar.inter_op.weigh import weigh_segments
from autopar.intra_op.graph import Graph
from autopar.intra_op.hand_plans import restrict_to_axes
from autopar.intra_op.restrict import Allowed, Restrict
from autopar.ir.gradient import is_backward, is_recomputed
from autopar.ir.program import Program
from autopar.ir.region import kind_of
from autopar.ir.rewrite.trips_at_once import own_microbatches
from autopar.mesh import Cluster, LogicalMesh, linked_mesh, logical_meshes, more_devices_text
from autopar.search.fastest_borders import in_fastest_borders
from autopar.search.methods import PipelineParallel, ThreeD, method_text
from autopar.search.one_mesh import in_microbatches
from autopar.search.parts import even_parts, parts_apart
from autopar.search.pipeline import SlowerError, plan_pipeline
from autopar.search.progress import Report, silent
from autopar.search.request import Request
from autopar.search.solve_stages import Solved, Terms
from autopar.search.uneven import uneven_text
from autopar.search.waits import shared_text, waits_text
from autopar.streams.assemble import PipelinePlan, all_lowered
from autopar.streams.schedules import AUTOMATIC, find_schedule, num_chunks
from autopar.tuning import TUNING

SCHEDULES_TRIED = ("1f1b", "zb-h1", "interleaved", "interleaved-4")
"""Tried in this order for `schedule="auto"`, as long as devices wait much under the best so far."""
ZERO_BUBBLE, WHOLE_LOOPS = "zb-h1", "zb-h1-whole"


def pipeline_of(request: Request, method: PipelineParallel | ThreeD, report: Report = silent) -> PipelinePlan:
    """Plan the pipeline that a method asks for; if it leaves the schedule open, the fastest of those that may help.

    Raises:
        As `pipeline_under`.
    """
    if method.schedule == ZERO_BUBBLE:
        return _zero_bubble(request, method, report)
    if method.schedule != AUTOMATIC:
        return pipeline_under(request, method, report, beat=request.beat)
    first, *others = SCHEDULES_TRIED
    best = pipeline_under(request, dataclasses.replace(method, schedule=first), report)
    for name in others:
        if best.waiting_share <= TUNING.much_waiting or request.options.is_over:
            break
        with contextlib.suppress(InfeasibleError, PipelineError):
            other = pipeline_under(request, dataclasses.replace(method, schedule=name), report)
            best = min(best, other, key=lambda planned: planned.seconds)
    return best


def _zero_bubble(request: Request, method: PipelineParallel | ThreeD, report: Report) -> PipelinePlan:
    """Plan a zero-bubble pipeline; if memory binds and it is faster, with loops over layers not split into B and W.

    Raises:
        As `pipeline_under`.
    """
    has_loops = any(kind_of(eqn) == "scan" and is_backward(eqn) for eqn in request.program.jaxpr.eqns)
    planned = None
    try:
        planned = pipeline_under(request, method, report)
    except InfeasibleError:
        if not has_loops:
            raise
    if planned is not None and not (has_loops and planned.memory_binds):
        return planned
    beat = math.inf if planned is None else planned.seconds
    with contextlib.suppress(InfeasibleError) if planned else contextlib.nullcontext():
        whole = pipeline_under(request, dataclasses.replace(method, schedule=WHOLE_LOOPS), report, beat=beat)
        if whole.seconds < beat:
            warn(f"{request.program.name}: {_whole_text(beat)}")
            return whole
    assert planned is not None, "one of both fits"
    return planned


def _whole_text(beat: float) -> str:
    why = "do not fit the memory" if beat == math.inf else "are slower within memory"
    return f"loops over layers split in two, as under {ZERO_BUBBLE!r}, {why}; {WHOLE_LOOPS!r}, which keeps them whole, is used."


def pipeline_under(
    request: Request,
    method: PipelineParallel | ThreeD,
    report: Report,
    meshes: Sequence[LogicalMesh] = (),
    beat: float = math.inf,
) -> PipelinePlan:
    """Plan the pipeline that a method asks for under its schedule.

    Args:
        request: The step and the cluster.
        method: The method, which may differ from the request's.
        report: Called with progress.
        meshes: The logical meshes to try for each stage; (): those that the method allows.
        beat: Seconds of the best step known. A pipeline that is no faster even with unlimited memory is returned as planned
            then, whether it fits or not.

    Raises:
        DeviceCountError: The devices do not divide into the stages.
        PipelineError: The step has fewer segments than stages.
        BatchError: The batch does not divide into the microbatches requested.
        MicrobatchError: The microbatches requested would change what the step computes.
        InfeasibleError: A stage does not fit.
    """
    options, program, cluster = request.options_of(method), request.program, request.cluster
    schedule = find_schedule(method.schedule)
    chunks = num_chunks(schedule)
    num_meshes = _num_meshes(method, program, chunks)
    num_stages, own_sizes = num_meshes * chunks, _submesh_sizes(method, num_meshes, cluster)
    sizes = own_sizes * chunks
    data = method.data if isinstance(method, ThreeD) else 1
    count = method.num_microbatches or default_microbatches(request, num_meshes, data)
    plan = _planner(request, method, sizes, meshes, report)

    def cut_in(parts: int, count: int) -> CutStep:
        how = parts, count, options.microbatch_semantics
        cut = cut_step(program, request.roles, *how, num_devices=cluster.num_devices)
        check_stage_count(cut, num_stages, chunks)
        return weigh_segments(cut, min(sizes), cluster.device)

    report(f"cutting {program.name} into {num_stages} stages, {count} microbatches", 0.0)
    cut, whole = _cut_or_whole(request, partial(cut_in, num_stages), count, method.num_microbatches is None)
    again = partial(cut_in, count=cut.split.count)
    parts = even_parts(cut, num_stages)
    cut = cut if parts == cut.stacks.count else again(parts)
    if isinstance(method, PipelineParallel) and not (method.num_stages or method.submeshes):
        _check_marks(cut, num_stages)
    planned = all_lowered(_best_in_memory(request, cut, again, plan, report, beat), cluster)
    text = uneven_text(planned.cut, planned.borders, own_sizes)
    shared = shared_text(request, method, [stage.sharded for stage in planned.stages], planned.cut.split.count)
    for each in (whole, text, waits_text(planned), shared):
        if each:
            warn(f"{program.name}: {each}")
    return planned


def _num_meshes(method: PipelineParallel | ThreeD, program: Program, chunks: int) -> int:
    """Number of meshes, each with so many chunks, from the method, or else from the marks in the step.

    Raises `PipelineError`: neither tells, or the marks do not make whole stages.
    """
    if isinstance(method, ThreeD):
        return method.pipeline
    marked = _marked_stages(program, chunks)
    found = method.num_stages or len(method.submeshes or ()) or marked
    if not found:
        raise PipelineError(
            "the number of stages is missing.",
            given="PipelineParallel() and no autopar.mark_stage in the step",
            wrong="neither says where to cut.",
            do="pass num_stages=....",
            num_stages=0,
        )
    return found


def meshes_of_one_program(request: Request, method: PipelineParallel | ThreeD) -> list[LogicalMesh]:
    """The meshes to try for a step that is one stage and takes its batch at once, which one program can do.

    []: it has more stages or microbatches, or the user states an order or what is recomputed.
    """
    is_stated = method.recompute != "auto" or not isinstance(method.schedule, str)
    if is_stated or (method.num_microbatches or 1) > 1:
        return []
    chunks = 1 if method.schedule == AUTOMATIC else num_chunks(find_schedule(method.schedule))
    if chunks * _num_meshes(method, request.program, chunks) > 1:
        return []
    return _meshes(method, request.cluster, *_submesh_sizes(method, 1, request.cluster))


def _planner(
    request: Request,
    method: PipelineParallel | ThreeD,
    sizes: Sequence[int],
    meshes: Sequence[LogicalMesh],
    report: Report,
) -> Callable[[CutStep, float], PipelinePlan]:
    """A function from a cut and `beat` to a plan under the method's schedule, for stages of these sizes.

    `meshes` as in `pipeline_under`, `beat` as in `plan_pipeline`. All cuts share their caches.
    """
    cluster, schedule = request.cluster, find_schedule(method.schedule)
    of_stages = [meshes or _meshes(method, cluster, size) for size in sizes]
    gap = TUNING.hand_gap if isinstance(method, ThreeD) else TUNING.stage_gap
    terms = Terms(cluster, request.options_of(method), Solved(), gap)

    def restrict(stage: StageProgram, mesh: LogicalMesh) -> tuple[Restrict | None, Hashable]:
        return (_three_d(stage, method) if isinstance(method, ThreeD) else None), ()

    def plan(cut: CutStep, beat: float) -> PipelinePlan:
        def plan_within(borders: tuple[int, ...]) -> PipelinePlan:
            return plan_pipeline(cut, borders, of_stages, schedule, terms, restrict, beat, report)

        return in_fastest_borders(cut, sizes, schedule, terms, plan_within, beat)

    return plan


def _cut_or_whole(
    request: Request, cut_for: Callable[[int], CutStep], count: int, is_open: bool
) -> tuple[CutStep, str]:
    """Cut the step for so many microbatches; if the user left the number open and that fails, for one, with a warning.

    Raises:
        BatchError, MicrobatchError: As `cut_step`, for a number that the user gave.
    """
    try:
        return cut_for(count), ""
    except (BatchError, MicrobatchError) as error:
        if not is_open or count == 1:
            raise (_of_pipelines(request, count, error) if isinstance(error, MicrobatchError) else error) from None
        why = f"{error.summary.rstrip('.')} ({error.given})"
        return cut_for(1), (
            f"num_microbatches is left open, and {why}; so the stages take the whole batch at once, and run one after the "
            f"other: that saves memory, but no time. To choose otherwise, {error.do}"
        )


def _of_pipelines(request: Request, count: int, error: MicrobatchError) -> MicrobatchError:
    """The error, extended by the advice to use one mesh, if microbatches work there."""
    semantics, num_devices = request.options.microbatch_semantics, request.cluster.num_devices
    try:
        in_microbatches(request.program, request.roles, count, semantics, num_devices)
    except AutoparError:
        return error
    return MicrobatchError(
        error.summary,
        given=error.given,
        wrong=error.wrong,
        do=f"{error.do.removesuffix('.')}; or, on one mesh, ShardParallel(num_microbatches={count}), which is exact: it loops "
        "over the microbatches again for values that depend on all of them.",
        **error.facts,
    )


def _best_in_memory(
    request: Request,
    cut: CutStep,
    cut_in: Callable[[int], CutStep],
    plan: Callable[[CutStep, float], PipelinePlan],
    report: Report,
    beat: float,
) -> PipelinePlan:
    """Plan a cut; if memory demands recomputation, also with each layer by itself, outside of loops, if that is faster.

    `beat` is as in `pipeline_under`.

    Raises:
        InfeasibleError: Neither fits.
        SlowerError: `beat` is out of reach, whichever layers are recomputed.
    """
    planned = failure = None
    try:
        planned = plan(cut, beat)
    except SlowerError:
        raise
    except InfeasibleError as error:
        failure = error
    if planned is not None and planned.seconds >= beat:
        return planned
    parts = parts_apart(request.program, request.roles, planned)
    finer = cut_in(parts) if parts not in (0, cut.stacks.count) else cut
    is_over = planned is not None and request.options.is_over
    if finer is not cut and finer.stacks.count == parts and not is_over:
        report(
            f"cutting {request.program.name} into {parts} layers, each by itself: memory demands that some run again"
        )
        beat = planned.seconds if planned is not None else beat
        with contextlib.suppress(InfeasibleError):
            other = plan(finer, beat)
            planned = other if other.seconds < beat else planned
    if planned is None:
        assert failure is not None, "there is a plan, or a failure"
        raise failure
    return planned


def default_microbatches(request: Request, num_stages: int, data: int = 1) -> int:
    """Four microbatches per stage, or the most below that which divide the batch, if possible over `data` devices.

    Of a step that adds up the gradients of microbatches of its own as many as these, which stages can be cut from.
    """
    if num_stages == 1:
        return 1
    own = own_microbatches(request.program.jaxpr)
    is_possible = own > 0 and request.divides_into(own)
    return request.most_microbatches(own if is_possible else TUNING.microbatches_per_stage * num_stages, data)


def _marked_stages(program: Program, chunks: int) -> int:
    """Number of stages, of so many chunks each, by the user's marks; 0: there are none.

    Raises `PipelineError`: the chunks do not make whole stages.
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


def _check_marks(cut: CutStep, num_stages: int) -> None:
    """Check that every mark is a border between stages. Raises `PipelineError`: one is not."""
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
    """Number of devices of each stage; if meshes hold several stages, of each mesh.

    Raises `DeviceCountError`: there are more or fewer devices.
    """
    available = cluster.num_devices
    if isinstance(method, ThreeD):
        sizes = [method.data * method.tensor] * num_stages
        taken = f"{num_stages} stages of {sizes[0]} devices take {sum(sizes)}"
    elif method.submeshes:
        sizes = list(method.submeshes)
        taken = f"the submeshes take {sum(sizes)}"
    else:
        sizes = [available // num_stages] * num_stages
        taken = f"{num_stages} stages take at least {num_stages}"
        if available >= num_stages:
            taken = f"{num_stages} stages do not get equally many of them"
    if sum(sizes) != available or min(sizes) < 1:
        wanted = max(sum(sizes), num_stages)
        own = ", or give each stage its own number, submeshes=(1, 2, ...)" if wanted < available else ""
        if isinstance(method, ThreeD):
            rest = method.tensor * num_stages
            own = f": with the rest as it is, data={available // rest}" if available % rest == 0 else ""
        raise DeviceCountError(
            "the stages do not fit the cluster.",
            given=f"{method_text(method)} on {cluster}",
            wrong=f"there {'is 1 device' if available == 1 else f'are {available} devices'}, and {taken}.",
            do=f"choose numbers whose product (or sum, of submeshes) is the number of devices{own}."
            + more_devices_text(cluster, wanted),
            wanted=wanted,
            available=available,
        )
    return sizes


def _meshes(method: PipelineParallel | ThreeD, cluster: Cluster, size: int) -> list[LogicalMesh]:
    if isinstance(method, ThreeD):
        return [linked_mesh(cluster, (method.data, method.tensor), ("data", "tensor"))]
    return logical_meshes(cluster, size)


def _three_d(stage: StageProgram, method: ThreeD) -> Restrict:
    def restrict(graph: Graph, allowed: Allowed) -> None:
        state = list(stage.aliases.values())
        restrict_to_axes(graph, allowed, state, method.zero, method.sequence)

    return restrict
