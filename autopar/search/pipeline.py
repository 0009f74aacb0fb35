"""Plans a pipeline with given borders, submeshes and schedule.

In:     a step in phases (`CutStep`), borders, logical meshes of each stage, schedule, terms.
Out:    the fastest `PipelinePlan` that fits.
Method: one program per stage, each sharded on its own logical mesh (equal stages once), first as if memory were unlimited.
        If that does not fit, stages recompute the least that makes them fit, or are sharded within memory, or both. Sharded
        within memory, a stage counts its residuals once per microbatch in flight under its schedule, and of several stages
        on one mesh each has its share of the memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence

from autopar.errors import InfeasibleError, NoPlanFoundError, needed_bytes
from autopar.inter_op.cut import CutStep
from autopar.inter_op.placement import place_stages
from autopar.inter_op.residuals import CHEAP
from autopar.inter_op.stage import StageProgram
from autopar.inter_op.stage_plan import StagePlan, resting_bytes
from autopar.inter_op.tasks import Tasks
from autopar.intra_op.problem import num_pairs
from autopar.mesh import Cluster, LogicalMesh
from autopar.search.pins import RestrictStage, restrict_stages, unrestricted
from autopar.search.progress import Report, part_of, silent
from autopar.search.solve_stages import SameStacks, Terms, best_stage, pinned, solve_stage, stage_seconds
from autopar.streams.assemble import PipelinePlan, assemble, at_levels, steps_in_order
from autopar.streams.schedules import Schedule, in_flight, num_chunks, splits_backward
from autopar.tuning import TUNING

FLUSHED = "gpipe", "1f1b"
"""Schedules under which every microbatch passes all stages forward and back, one stage per mesh."""


class SlowerError(NoPlanFoundError):
    """Within memory a pipeline is slower than the best step known, even if residuals took no memory at all."""


def plan_pipeline(
    cut: CutStep,
    borders: Sequence[int],
    meshes: Sequence[Sequence[LogicalMesh]],
    schedule: Schedule,
    terms: Terms,
    restrict: RestrictStage = unrestricted,
    beat: float = math.inf,
    report: Report = silent,
) -> PipelinePlan:
    """Plan a pipeline whose borders and submeshes are given.

    Args:
        cut: The step in phases.
        borders: First segment of each stage.
        meshes: Per stage, the logical meshes to try; the fastest is taken. Stages take the cluster's devices in order.
        schedule: The order in which stages work.
        terms: Terms of sharding.
        restrict: Forbids choices of a stage on a mesh, besides the user's constraints.
        beat: Objective (`Options.goal`) of the best pipeline known. A pipeline that is no better even with unlimited memory
            is returned as planned then, whether it fits or not.

    Raises:
        InfeasibleError: A stage does not fit; says which and by how much.
        SlowerError: `beat` is out of reach, whatever is recomputed.
        ConstraintError: A constraint cannot be met on any mesh of a stage.
        PipelineError: The stages cannot be placed on the hosts.
    """
    num_meshes = len(borders) // num_chunks(schedule)
    place_stages(
        [candidates[0].num_devices for candidates in meshes[:num_meshes]], terms.cluster
    )  # fails before solving
    levels = terms.options.recompute_levels(len(borders)) or ()
    tasks, programs = terms.solved.pieces_of(cut, borders, splits_backward(schedule), levels)
    restrict = restrict_stages(cut, terms.options.constraints, restrict)
    return _PipelinePlanner(cut, tasks, programs, meshes, schedule, terms, restrict, beat).best(report, bool(levels))


class _PipelinePlanner:
    """Plans one pipeline in several ways; arguments as in `plan_pipeline`.

    `fastest`: objective (`Options.goal`) of the first way that worked, which bounds the others; 0: none yet.
    """

    def __init__(
        self,
        cut: CutStep,
        tasks: Tasks,
        programs: Sequence[StageProgram],
        meshes: Sequence[Sequence[LogicalMesh]],
        schedule: Schedule,
        terms: Terms,
        restrict: RestrictStage,
        beat: float,
    ):
        self.cut, self.tasks, self.programs, self.meshes, self.schedule = cut, tasks, programs, meshes, schedule
        self.terms, self.restrict, self.beat = terms, restrict, beat
        self.fastest = 0.0
        self._before: list[StagePlan] = []
        self._endless: list[float] = []
        self._is_bounded = schedule.name in FLUSHED and terms.options.goal == "step"
        self._room = _Room(len(programs))

    def best(self, report: Report, is_recomputed: bool) -> PipelinePlan:
        """The fastest plan that fits; `is_recomputed`: whether the user fixed the recomputation levels."""
        fitting: list[PipelinePlan] = []
        failures: list[InfeasibleError] = []
        budget, goal, ways = self.terms.budget_bytes, self.terms.options.goal, [*_ways(self.terms)]
        for number, way in enumerate(ways):
            try:
                planned = self.plan(number, way, part_of(report, number / len(ways), (number + 1) / len(ways)))
                if planned is None:
                    continue
                if self.fastest >= self.beat:
                    return planned
                if not is_recomputed:
                    planned = _recompute_to_fit(planned, self.terms.cluster, budget)
                check_budget(planned, budget)
            except InfeasibleError as error:
                failures.append(error.kept())
            else:
                fitting.append(planned)
            if fitting and self.terms.options.is_over:
                break
            if min([self.beat, *(p.seconds_for(goal) for p in fitting)]) * (1 - TUNING.near) <= self.fastest:
                break
        if not fitting:
            raise _most_telling(failures, budget)
        return min(fitting, key=lambda p: p.seconds_for(goal))

    def plan(self, number: int, way: Terms, report: Report) -> PipelinePlan | None:
        """Plan the pipeline in the way of this number; way 0 has unlimited memory.

        Returns the plan; None: its stages are those of the way before.
        """
        room = self._room if number == 1 else None
        made = _shard_stages(self.cut, self.programs, self.meshes, way, self.restrict, report, room)
        if self._is_bounded and number:
            made = _not_beaten(made, self._endless, self.cut.split.count, self.beat, self.terms.budget_bytes)
        stages = [*made]
        if not number:
            self._endless = [*map(once_seconds, stages)]
        before, self._before = self._before, stages
        if before and all(now.sharded is then.sharded for now, then in zip(stages, before, strict=True)):
            return None
        planned = assemble(self.tasks, stages, self.terms.cluster, self.schedule)
        if not number:
            self._room.divide(planned)
        self.fastest = self.fastest or planned.seconds_for(self.terms.options.goal)
        return planned


def _not_beaten(
    stages: Iterator[StagePlan], endless: Sequence[float], count: int, beat: float, budget: float
) -> Iterator[StagePlan]:
    """Pass on stages as long as a step with them may beat the best known.

    `endless`: per stage, seconds of one microbatch with unlimited memory, a lower bound.

    Raises `SlowerError`: a step with these stages cannot beat it.
    """
    once: list[float] = []
    for stage in stages:
        once.append(once_seconds(stage))
        least = least_seconds([*once, *endless[len(once) :]], count)
        may_lose = TUNING.near if num_pairs(stage.sharded.problem) > TUNING.small_core else 0.0
        if least >= beat * (1 - may_lose):
            raise _slower(least, budget)
        yield stage


def _most_telling(failures: Sequence[InfeasibleError], budget: float) -> InfeasibleError:
    """The most informative of the failures, one per way."""
    # The last way is the most permissive: it counts no memory for results that may be recomputed.
    if isinstance(failures[-1], SlowerError):
        return failures[-1]
    # Prefer failures within the whole memory to those within a stage's share.
    whole = [error for error in failures if not getattr(error, "budget_bytes", budget) < budget - 1]
    return min(whole or failures, key=needed_bytes)


def _ways(terms: Terms) -> Iterator[Terms]:
    """Ways to shard the stages: unlimited memory; within memory; within memory with results that may be recomputed free.

    In the second way a stage counts all microbatches in flight, within its share of the memory (`_Room`); in the third
    one microbatch, within all of it: what is then too much is recomputed, or was due to rounding.
    """
    yield dataclasses.replace(terms, options=dataclasses.replace(terms.options, memory_budget_bytes=math.inf))
    if math.isfinite(terms.budget_bytes):
        yield terms
        yield dataclasses.replace(terms, all_again=terms.options.recompute != "cheap")


def _shard_stages(
    cut: CutStep,
    programs: Sequence[StageProgram],
    meshes: Sequence[Sequence[LogicalMesh]],
    terms: Terms,
    restrict: RestrictStage,
    report: Report,
    room: _Room | None,
) -> Iterator[StagePlan]:
    """Shard each stage on the best of its meshes, with parts of one stack sharded alike; within the `room`, if given."""
    same = SameStacks(cut)
    for number, (program, candidates) in enumerate(zip(programs, meshes, strict=True)):
        report(f"sharding stage {number} of {len(programs)}", number / len(programs))
        own = terms if room is None else room.of(number, terms)
        with _naming(f"stage {number} of {len(programs)}"):
            made = best_stage(program, candidates, own, restrict)
        there = same.mesh_of(program)
        if there is not None and there != made.mesh and there in candidates:
            with contextlib.suppress(InfeasibleError):
                alike = best_stage(program, [there], own, restrict)
                made = alike if stage_seconds(alike) <= (1 + TUNING.one_array) * stage_seconds(made) else made
        pins = same.pins(program, made)
        if pins:
            further, key = restrict(program, made.mesh)
            made = solve_stage(program, made.mesh, own, pinned(pins, further), (tuple(pins.items()), key))
        same.add(program, made)
        yield made


class _Room:
    """Each stage's share of its mesh's memory, and its microbatches in flight; rounded, so that equal stages stay equal."""

    def __init__(self, num_stages: int):
        self._parts, self._in_flight = [1.0] * num_stages, [1] * num_stages

    def divide(self, planned: PipelinePlan) -> None:
        """Give each of several stages on one mesh what the others leave while it runs, by a plan with unlimited memory."""
        peaks, finest = planned.simulation.peak_bytes, TUNING.parts_of_memory
        order = steps_in_order(planned.cut, len(peaks), planned.schedule)
        self._in_flight = [min(n for k in range(32) for n in (1 << k, 3 << k) if n >= at) for at in in_flight(order)]
        waits = [resting_bytes(stage, at) for stage, at in zip(planned.stages, self._in_flight, strict=True)]
        for number in range(len(waits)):
            mesh = number % len(peaks)
            left = 1 - (sum(waits[mesh :: len(peaks)]) - waits[number]) / peaks[mesh]
            self._parts[number] = max(1, math.floor(left * finest)) / finest

    def of(self, number: int, terms: Terms) -> Terms:
        """The terms of a stage, with its share of the memory and its microbatches in flight."""
        options = terms.options
        if self._parts[number] < 1:
            part = int(self._parts[number] * terms.budget_bytes)
            options = dataclasses.replace(options, memory_budget_bytes=part)
        return dataclasses.replace(terms, options=options, in_flight=self._in_flight[number])


def once_seconds(stage: StagePlan) -> float:
    """Seconds of one microbatch in a stage, forward and backward."""
    return sum(t.seconds for t in stage.tasks if t.task.is_in_loop)


def least_seconds(once: Sequence[float], count: int) -> float:
    """Lower bound on a step with one stage per mesh and flushed pipelines: the slowest stage handles all microbatches, and
    before and after it one passes the others. `once`: per stage, seconds of one microbatch.
    """
    return sum(once) + (count - 1) * max(once)


def _slower(seconds: float, budget: float) -> SlowerError:
    return SlowerError(
        f"left out: within memory at least {seconds:.3e} s",
        given=f"{budget:.0f} bytes on each device",
        wrong="a faster step is known.",
        do="nothing: another plan is taken.",
        budget_bytes=int(budget),
    )


@contextlib.contextmanager
def _naming(stage: str) -> Iterator[None]:
    """Context that adds a stage's name to infeasibility errors."""
    try:
        yield
    except InfeasibleError as error:
        given = f"{stage}, {error.given}"
        raise InfeasibleError(error.summary, given=given, wrong=error.wrong, do=error.do, **error.facts) from error


def _recompute_to_fit(planned: PipelinePlan, cluster: Cluster, budget: float) -> PipelinePlan:
    """Raise the recomputation levels of stages on meshes that exceed the budget, until all fit.

    Returns the pipeline that fits; if none does, the one with the least peak.
    """
    num_meshes, least = len(planned.streams.instructions), planned
    ladders: dict[int, list[float]] = {}
    while True:
        raised: dict[int, float] = {}
        for mesh, peak in planned.simulation.peak_bytes.items():
            own = range(mesh, len(planned.stages), num_meshes)
            if peak > budget:
                ladders |= {s: planned.tasks.levels_of(s)[1:] for s in own if s not in ladders}
                left = [s for s in own if ladders[s]]
                if not left:
                    return least
                stage = min(left, key=lambda s: (planned.tasks.levels[s], s))
                raised[stage] = ladders[stage].pop(0)
        if not raised:
            return planned
        planned = at_levels(planned, raised, cluster)
        least = min(least, planned, key=lambda p: p.peak_bytes)


def check_budget(planned: PipelinePlan, budget: float) -> None:
    """Check that no device exceeds the memory budget. Raises `NoPlanFoundError`: one does; names the stage."""
    mesh, peak = max(planned.simulation.peak_bytes.items(), key=lambda item: item[1])
    if peak > budget:
        count, levels = len(planned.stages), set(planned.tasks.levels)
        again = "" if levels == {CHEAP} else ", however much of its forward pass is recomputed"
        raise NoPlanFoundError(
            "a stage does not fit the memory budget.",
            given=f"stage {mesh} of {count} on {planned.stages[mesh].mesh}, schedule {planned.schedule.name!r}, "
            f"{planned.cut.split.count} microbatches, {budget:.0f} bytes on each device",
            wrong=f"{peak} bytes are alive on a device at once{again}.",
            do="use more stages or devices, more microbatches, or the schedule '1f1b'.",
            budget_bytes=int(budget),
            needed_bytes=int(peak),
        )
