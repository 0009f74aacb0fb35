"""Plans a traced step for a cluster: the order of the searches, each of which has a file of its own.

In:     `Program`, its roles, cluster, method.
Out:    `Plan`, with the sharded program attached.
Method: every logical mesh that the method allows is planned, and the fastest plan wins, ties going to fewer axes; then
        microbatches, recomputation and pipelines are tried, if the method leaves them open and they may win.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Sequence

from autopar.debug import dump
from autopar.errors import (
    AutoparError,
    BatchError,
    InfeasibleError,
    NoPlanFoundError,
    NotBuiltYetError,
    warn,
)
from autopar.intra_op.problem import planning_seconds
from autopar.ir.passes import without_collection
from autopar.ir.program import Program
from autopar.ir.trace.state import Roles
from autopar.mesh import Cluster, LogicalMesh, finer_meshes
from autopar.plan.words import padding_text, seconds_text
from autopar.report.plan import Plan
from autopar.search.accumulation import best_meshes, memory_binds, repays_room, search_accumulation
from autopar.search.alone import search_alone
from autopar.search.describe import describe_plan
from autopar.search.dumped import dump_plan
from autopar.search.followed import pipeline_behind
from autopar.search.meshes import Searched, search_meshes, search_unaided, untie_best
from autopar.search.method_meshes import candidate_meshes
from autopar.search.methods import (
    Auto,
    DataParallel,
    Follow,
    Inference,
    Method,
    PipelineParallel,
    ThreeD,
    count_of,
)
from autopar.search.offload import Planned, check_hosts, within_memory
from autopar.search.one_mesh import in_microbatches
from autopar.search.padding import lengths_that_do_not_divide, padded_program, worth_padding
from autopar.search.parts import finds_what_it_made
from autopar.search.pins import find_pins
from autopar.search.progress import Anytime, Report, part_of, silent
from autopar.search.request import Narrowed, Request
from autopar.search.stage_planner import meshes_of_one_program, pipeline_of
from autopar.search.stage_search import Stages, search_pipelines
from autopar.search.waits import shared_text
from autopar.streams.assemble import StepPlan, all_lowered, assemble_step
from autopar.tuning import TUNING

Tried = list[tuple[str, str]]
"""What was tried: (what, its seconds or why not)."""


@without_collection()
def make_plan(program: Program, roles: Roles, cluster: Cluster, method: Method, report: Report = silent) -> Plan:
    """Plan one step; `report` is called with a line of progress before each piece of work.

    Raises:
        AutoparError: No mesh allows a plan; the message of the last one tried says why.
        BatchError: The batch has no rows.
        ConstraintError: A constraint names no argument, or cannot be met.
        NotBuiltYetError: The cluster has several kinds of devices.
    """
    started = time.perf_counter()
    dump("program", program.__str__)
    anytime = Anytime(report, method.planning_seconds)
    request = Request(program, roles, cluster, method, ends=anytime.ends)
    _check_one_kind(cluster)
    _check_rows(program, roles)
    # Reports mistakes in constraints before any work.
    find_pins(program.in_paths, request.options.constraints, program.out_paths)
    planned, offloaded = within_memory(lambda asked: _with_padding(asked, anytime), request)
    dump_plan(planned.step)
    plan = describe_plan(request, planned.step, time.perf_counter() - started)
    cost = dataclasses.replace(plan.cost, search=anytime.search())
    plan = dataclasses.replace(
        plan,
        alternatives=tuple(planned.tried),
        cost=cost,
        padded=tuple(planned.padded.items()),
        offloaded=offloaded.arguments,
        offloaded_activations=offloaded.activations,
    )
    check_hosts(plan, cluster.device)
    return plan


def _with_padding(request: Request, report: Anytime) -> Planned:
    """Plan the step, also with padded dims if that may pay; returns the faster plan."""
    planned: StepPlan | None = None
    tried: Tried = []
    shown = request.narrowed or Narrowed()
    failure: InfeasibleError | None = None
    splits_other_dims = not isinstance(request.method, DataParallel | Follow)
    lengths = lengths_that_do_not_divide(request) if splits_other_dims else {}
    try:
        planned, tried, shown = _planned(request, report)
    except InfeasibleError as error:
        if not lengths or report.reason:
            raise
        failure = error.kept()
    if planned is not None:
        lengths = {} if report.reason else worth_padding(planned, lengths, request, 1 + len(tried))
    if lengths:
        try:
            padded = dataclasses.replace(request.of(padded_program(request.program, lengths)), narrowed=shown)
            longer, more, _ = _planned(padded, report)
        except AutoparError as error:
            tried = [*tried, (padding_text(lengths), error.summary)]
        else:
            goal = request.options.goal
            least = math.inf if planned is None else planned.seconds_for(goal)
            if longer.seconds_for(goal) < (1 - TUNING.padding_gains) * least:
                return Planned(longer, [*tried, *more], lengths, Narrowed())
            tried = [*tried, (padding_text(lengths), seconds_text(longer.seconds))]
    if planned is None:
        assert failure is not None, "there is a plan, or a failure"
        raise failure
    return Planned(planned, tried, {}, shown)


def _planned(request: Request, report: Anytime) -> tuple[StepPlan, Tried, Narrowed]:
    """Plan the step by its method; returns the plan, what else was tried, and what the search has shown."""
    match request.method:
        case PipelineParallel() | ThreeD() as method:
            return _stages(request, method, report)
        case Follow() as method:
            return pipeline_behind(request, method, report), [], Narrowed()
    return _search(request, report)


def _stages(request: Request, method: PipelineParallel | ThreeD, report: Anytime) -> tuple[StepPlan, Tried, Narrowed]:
    """Plan stages; one that takes its batch at once as one program, unless it fits only, or is faster, if it recomputes."""
    whole = None
    if meshes_of_one_program(request, method):
        with contextlib.suppress(InfeasibleError):
            whole = _search(request, report)
    if whole is not None and not whole[0].stages[0].sharded.problem.rows:
        return whole
    beat = math.inf if whole is None else whole[0].seconds
    with contextlib.suppress(InfeasibleError) if whole else contextlib.nullcontext():
        planned = pipeline_of(dataclasses.replace(request, beat=min(beat, request.beat)), method, report)
        if planned.seconds < beat:
            return planned, [], Narrowed()
    assert whole is not None, "one of both fits"
    return whole


def _search(request: Request, report: Anytime) -> tuple[StepPlan, Tried, Narrowed]:
    """Search the meshes that a method allows; for `Auto()` also microbatches and pipelines."""
    search = _Search(request, report)
    search.on_meshes()
    search.in_microbatches()
    if search.on_hosts:
        search.on_finer_meshes()
    search.alone()
    near = request.narrowed is None or request.narrowed.stages
    if near and (
        search.on_hosts or (isinstance(request.method, Auto | Inference) and _can_gain(request, search.searched))
    ):
        search.in_stages()
    search.unaided()
    report.tried = search.tried
    if report.reason and report.reason != report.time_is_up:
        warn(
            f"{request.program.name}: planning was stopped, and the best plan so far is used. Ctrl-C again stops the step."
        )
    return *search.best(), search.shown


class _Search:
    """The state of a search, pass by pass; passes are skipped once planning is to end.

    Attributes:
        searched: The plans found on one mesh, in `count` microbatches.
        tried: What was tried: (what, its seconds or why not).
        on_hosts: Whether pipelines are searched whatever they may win: on several hosts.
    """

    def __init__(self, request: Request, report: Anytime):
        method = request.method
        self.request, self.report = request, report
        self.on_hosts = isinstance(method, Auto | Inference) and request.cluster.hosts > 1
        self.meshes = candidate_meshes(request)
        if self.on_hosts:
            # Meshes of three axes come later, and start from the answers on these.
            self.meshes = [mesh for mesh in self.meshes if len(mesh.shape) <= 2] or self.meshes
        self.meshes = self._narrowed(self.meshes) or self.meshes
        self.count = count_of(method)
        how = self.count, request.options.microbatch_semantics, request.cluster.num_devices
        self.program = in_microbatches(request.program, request.roles, *how)
        self.searched, self.stages = Searched([], []), Stages()
        self.tried = self.searched.tried
        self.share = TUNING.meshes_share if isinstance(method, Auto | Inference) else 1.0

    def on_meshes(self) -> None:
        """Plan the step, in the microbatches that the method asks for, on each mesh."""
        with self._a_pass("meshes"):
            beat = (1 + TUNING.exposure_guessed) * self.request.beat
            self._search_meshes(self.meshes, part_of(self.report, 0.0, self.share), self.searched, beat)

    def in_microbatches(self) -> None:
        """`Auto()`: try more microbatches, if memory binds."""
        if self.report.reason or not isinstance(self.request.method, Auto):
            return
        with self._a_pass("microbatches"):
            for found in search_accumulation(self.request, self.meshes, self.searched, self._silently):
                self.count, self.program, self.searched = found.count, found.program, found.searched

    def on_finer_meshes(self) -> None:
        """Try meshes that win little, or take long to plan, now that there is a plan to beat."""
        if self.report.reason or not self.searched.results:
            return
        cluster = self.request.cluster
        narrowed = self._narrowed(finer_meshes(cluster, cluster.num_devices))
        finer = [m for m in narrowed if m not in self.meshes]
        further = Searched(list(self.searched.results), [])
        with self._a_pass("finer meshes"):
            self._search_meshes(finer, self._silently, further)
        self.searched.results = further.results
        self.tried += [(self._named(name), outcome) for name, outcome in further.tried]

    def alone(self) -> None:
        """`Auto()`: try one stage with recomputation, if memory binds, or did before microbatches."""
        method, searched, request = self.request.method, self.searched, self.request
        if self.report.reason or not isinstance(method, Auto):
            return
        in_place_of_again = self.count > 1 and finds_what_it_made(request.program, request.roles)
        # What a step in microbatches loses to their number is part of its bound, so that this says nothing of it.
        binds = memory_binds(searched) and (self.count > 1 or repays_room(request, searched))
        if not (binds or in_place_of_again):
            return
        best = best_meshes(self.meshes, searched)
        meshes = [mesh for mesh in best if len(mesh.shape) < 3] or best[:1]
        with self._a_pass("run again"):
            search_alone(request, method, meshes, self.stages, self._silently, self._least, self.count)

    def in_stages(self) -> None:
        """Search pipelines."""
        if self.report.reason:
            return
        with self._a_pass("stages"):
            search_pipelines(self.request, self.stages, part_of(self.report, self.share, 1.0), self._least)
        self.tried += self.stages.tried

    def unaided(self) -> None:
        """Plan the best mesh as a method would that names it, unless a pipeline is faster by more than that wins."""
        staged, searched = self.stages.best, self.searched
        seconds = math.inf if staged is None else staged.seconds_for(self.request.options.goal)
        if (
            self.report.reason
            or not searched.results
            or seconds < (1 - TUNING.untied_near) * searched.best.step_seconds
        ):
            return
        with self._a_pass("best mesh"):
            search_unaided(self.request.of(self.program), searched, self._silently)
        if searched.best.step_seconds < seconds:
            self.stages.best = None

    def best(self) -> tuple[StepPlan, Tried]:
        """The fastest plan of all, and what else was tried.

        Raises `AutoparError`: there is no plan; says why a mesh has none.
        """
        if self.stages.best is not None:
            return all_lowered(self.stages.best, self.request.cluster), self.tried
        if not self.searched.results:
            raise self.searched.failure or _slower(self.request)
        best = untie_best(self.request.of(self.program), self.searched)
        if text := shared_text(self.request, self.request.method, [best], self.count):
            warn(f"{self.request.program.name}: {text}")
        others = [pair for pair in self.tried if pair[0] != self._named(str(best.mesh))]
        return assemble_step(self.program, self.request.roles, self.count, best), others

    @property
    def shown(self) -> Narrowed:
        """What is worth searching again for a rewritten step: the best meshes, and one that three axes begin from."""
        results, best = self.searched.results, self.stages.best
        if not results or best is not None:
            return Narrowed((), self.stages.near, self._least)
        coarse = [s for s in results if len(s.mesh.shape) <= 2]
        begin = [min(coarse, key=lambda sharded: sharded.step_seconds).mesh] if coarse else []
        meshes = tuple(dict.fromkeys([*best_meshes(self.meshes, self.searched), *begin]))
        return Narrowed(meshes, self.stages.near, self._least)

    def _narrowed(self, meshes: list[LogicalMesh]) -> list[LogicalMesh]:
        """Of these meshes those that the request is narrowed to."""
        named = self.request.narrowed.meshes if self.request.narrowed else ()
        return [mesh for mesh in meshes if mesh in named] if named else meshes

    @property
    def _least(self) -> float:
        """Seconds of the best step known."""
        known = [sharded.step_seconds for sharded in self.searched.results]
        return min([self.request.beat, *known, *([self.stages.best.seconds] if self.stages.best else [])])

    @property
    def _silently(self) -> Report:
        """A report for passes that do not advance the overall progress."""
        return part_of(self.report, self.share, self.share)

    def _a_pass(self, name: str) -> contextlib.AbstractContextManager[None]:
        return self.report.one_pass(name, lambda: bool(self.searched.results or self.stages.best))

    def _search_meshes(
        self, meshes: Sequence[LogicalMesh], report: Report, searched: Searched, beat: float = math.inf
    ) -> None:
        search_meshes(self.request.of(self.program), meshes, report, searched, beat)

    def _named(self, mesh: str) -> str:
        """A mesh's description with the number of microbatches, if the search chose that."""
        return mesh if self.count == count_of(self.request.method) else f"{mesh}, {self.count} microbatches"


def _slower(request: Request) -> InfeasibleError:
    return NoPlanFoundError(
        "no plan is faster than the best step known.",
        given=f"a step of {seconds_text(request.beat)}",
        wrong="on each mesh the least seconds are more.",
        do="nothing: the best step known is used.",
    )


def _can_gain(request: Request, searched: Searched) -> bool:
    """Whether pipelines may be worth their bubble: nothing else fits, or the best plan is far from perfect sharing."""
    if request.cluster.num_devices == 1:
        return False
    if not searched.results:
        return True
    best = searched.best
    won, options = best.step_seconds - best.shared_seconds, request.options
    takes = min(TUNING.stages_seconds, TUNING.stages_solves * planning_seconds(best.problem))
    # Solving within memory takes longer than a search for small stages, which hold less.
    is_quick = memory_binds(searched) and takes <= TUNING.stages_quick
    repaid = options.goal == "calls" or is_quick or options.repays(TUNING.hoped * won, takes)
    return repaid and won > TUNING.stages_gain * best.step_seconds


def _check_one_kind(cluster: Cluster) -> None:
    if cluster.groups:
        raise NotBuiltYetError(
            "planning for several kinds of devices at once is not built yet.",
            given=str(cluster),
            wrong="one mesh is made of equal devices, and this version gives every stage devices of one kind.",
            do="plan for one of the kinds: " + ", ".join(f'Cluster.of("{group}")' for group in cluster.groups) + ".",
            feature="heterogeneous clusters",
        )


def _check_rows(program: Program, roles: Roles) -> None:
    for leaf, dims in roles.dims.items():
        if not program.in_avals[leaf].shape[min(dims)]:
            raise BatchError(
                "the batch has no rows.",
                given=f"{program.in_paths[leaf]}: {program.in_avals[leaf].str_short()}",
                wrong="there is no sample in it to split.",
                do="pass one sample or more; if this argument is not the batch, name those that are in batch_argnums.",
                size=0,
            )
