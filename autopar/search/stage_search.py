"""Searches pipelines: stages, submeshes, logical shapes, microbatches and schedule together.

In:     a traced step, the cluster, options, the best step known without stages.
Out:    the best `PipelinePlan`, and what was tried; `search/planner.py` compares it with the plans without stages.
Method: coarse to fine. The step is cut into a chain of layers of similar work, at places where little crosses. Submeshes on
        which a single layer would take longer than the best step known are left out; on the others a table estimates
        stages of these layers (`layer_costs.py`, `table.py`). The best few candidates (`candidates.py`) that may beat the
        best step are then sharded, emitted, checked and simulated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.errors import AutoparError, BatchError, InfeasibleError, MicrobatchError
from autopar.inter_op.borders import layer_borders
from autopar.inter_op.cut import CutStep, check_stage_count, cut_step
from autopar.inter_op.weigh import weigh_segments
from autopar.ir.split.layers.layers import layer_count
from autopar.mesh import Cluster, Device, finer_meshes
from autopar.options import Goal
from autopar.search.candidates import Candidate, Estimates, Rounds, equal_candidates, find_candidates
from autopar.search.fastest_borders import in_fastest_borders
from autopar.search.layer_costs import LayerCosts, submesh_sizes
from autopar.search.parts import even_parts, parts_apart
from autopar.search.pipeline import SlowerError, plan_pipeline
from autopar.search.progress import Report, part_of, silent
from autopar.search.request import Request
from autopar.search.solve_stages import Solved, Terms
from autopar.streams.assemble import PipelinePlan
from autopar.streams.schedules import SCHEDULES, Schedule, num_chunks
from autopar.tuning import TUNING

FIRST_SCHEDULE, FORWARD_ONLY = "1f1b", "inference"
"""The first schedule tried with a backward pass, and without one."""
KEEPING, CHUNKED = ("gpipe",), ("interleaved", "interleaved-4")
"""Tried if devices wait much: schedules that keep more in memory; schedules that send more, in increasing order."""


@dataclass(slots=True)
class Stages:
    """The outcome of a search over pipelines.

    Attributes:
        best: The fastest; None: none fits, none beats the best step without stages, or the step cannot be cut.
        tried: What was tried: (what, its seconds or why not).
        near: Whether one was planned in full: not all were left out by their bounds.
    """

    best: PipelinePlan | None = None
    tried: list[tuple[str, str]] = field(default_factory=list)
    near: bool = False


def search_pipelines(request: Request, found: Stages, report: Report = silent, known: float = math.inf) -> None:
    """Search pipelines; extends `found` along the way. `known`: seconds of the best step without stages."""
    cluster, batch_sizes, budget = request.cluster, request.batch_sizes, request.budget_bytes
    # A stage's gain counts once per microbatch, so that solving always repays.
    options = dataclasses.replace(request.options, repaying_steps=math.inf)
    cuts = _Cuts(request)
    report("cutting the step into layers", 0.0, known)
    cut, counts = _reference_cut(cuts, _counts(request), found.tried)
    reference = counts[len(counts) // 2]
    forward_only = not any(cut.chain.backward)
    if forward_only:  # nothing is accumulated, and there is no backward pass to wait for: few microbatches may do
        counts = [*(m for m in TUNING.few_microbatches if request.divides_into(m) and m not in counts), *counts]
    # Layers are made of the same segments for every number of microbatches.
    chain = weigh_segments(cut, 1, cluster.device).chain
    borders = layer_borders(chain, TUNING.table_layers, TUNING.layer_slack)
    if len(borders) < 2:
        return
    work = np.add.reduceat(chain.work, borders)
    sizes = _worthy_sizes(work * reference, cluster, known, found.tried)
    terms = Terms(cluster, options, Solved())
    telling = part_of(report, 0.0, TUNING.layers_share)
    layers = LayerCosts(cuts.of, borders, work, sizes, batch_sizes, counts, terms, telling)
    calls = TUNING.calls_in_a_row if options.goal == "calls" else 1
    rounds = Rounds(calls, 1.0 if forward_only else TUNING.bubble_left, not forward_only)
    affordable = TUNING.finalist_equations // max(1, len(cut.program.jaxpr.eqns))
    effort = max(TUNING.finalists, min(TUNING.most_finalists, affordable))
    crossing_bytes = reference * np.array([cut.chain.cut_bytes[k] for k in borders], float)
    estimates = Estimates(layers, crossing_bytes, cluster, budget, rounds, max(cut.chain.num_segments, cuts.length))
    candidates = find_candidates(estimates, counts, effort // 2, known)
    finalists = candidates[:effort]

    def plan(candidate: Candidate, schedule: Schedule, beat: float) -> PipelinePlan:
        return _plan(cuts, terms, candidate, schedule, borders, beat)

    def apart(made: PipelinePlan | None) -> int:
        return parts_apart(request.program, request.roles, made)

    attempts = _Attempts(plan, apart, options.goal, budget, known, part_of(report, TUNING.layers_share, 1.0), found)
    attempts.expected = len(finalists) + max(1, effort // 4) + 2
    first = FORWARD_ONLY if forward_only else FIRST_SCHEDULE
    attempts.make_all(finalists, first)
    _try_too_large(attempts, estimates, counts, candidates, effort, first)
    if not forward_only:
        _try_schedules(attempts, effort)
    if found.best is not None:
        _try_finer_meshes(attempts, cluster, effort > TUNING.finalists, found.best.schedule.name)


class _Cuts:
    """A cache of cuts of the step, by number of microbatches and of parts of its scans over layers.

    `length`: number of layers in the scans that are split; 0: there are none.
    """

    def __init__(self, request: Request):
        self.length = layer_count(request.program.jaxpr, request.roles.may_hold_layers, request.roles.aliases)
        self._request = request
        self._known: dict[tuple[int, int], CutStep] = {}
        self._weighed: dict[tuple[int, int], tuple[CutStep, CutStep]] = {}

    def of(self, count: int, parts: int = 0) -> CutStep:
        """The step in `count` microbatches, its scans in `parts`; 0: as many as the table has layers.

        Raises:
            BatchError: The batch does not divide.
            MicrobatchError: Microbatches would change what the step computes.
        """
        key = (parts or layer_parts(self.length) if self.length else 0), count
        if key not in self._known:
            request = self._request
            how = key[0], count, request.options.microbatch_semantics
            spread = request.cluster.num_devices
            self._known[key] = cut_step(request.program, request.roles, *how, num_devices=spread)
        return self._known[key]

    def weighed(self, cut: CutStep, num_devices: int, device: Device) -> CutStep:
        """`weigh_segments`, cached."""
        key = id(cut), num_devices
        if key not in self._weighed:
            self._weighed[key] = cut, weigh_segments(cut, num_devices, device)
        return self._weighed[key][1]


def _reference_cut(cuts: _Cuts, counts: list[int], tried: list[tuple[str, str]]) -> tuple[CutStep, list[int]]:
    """The step cut for the middle number of microbatches, and the numbers to try; only 1 if it has no microbatches."""
    reference = counts[len(counts) // 2]
    try:
        return cuts.of(reference), counts
    except (MicrobatchError, BatchError) as error:
        tried.append((f"{reference} microbatches", error.summary))
        return cuts.of(1), [1]


def layer_parts(length: int) -> int:
    """Number of parts of scans over so many layers: the most equal parts up to `table_layers`, if at least half of that."""
    most = TUNING.table_layers
    equal = next((n for n in range(min(length, most), most // 2 - 1, -1) if length % n == 0), 0)
    return equal or min(length, most)


def _worthy_sizes(work: np.ndarray, cluster: Cluster, known: float, tried: list[tuple[str, str]]) -> list[int]:
    """Numbers of devices for a stage on which a typical layer takes less than the best step known.

    `work`: per layer, seconds of a step on one device.
    """
    least = float(np.median(work))
    limit = known if math.isfinite(known) else TUNING.generous * float(work.sum()) / cluster.num_devices
    sizes = submesh_sizes(cluster)
    worthy = [size for size in sizes if least / size < limit]
    if len(worthy) < len(sizes) and math.isfinite(known):
        few = ", ".join(str(size) for size in sizes if size not in worthy)
        tried.append(
            (
                f"stages on {few} devices",
                f"left out: one layer takes at least {least / max(set(sizes) - set(worthy)):.3e} s",
            )
        )
    return worthy or sizes[-1:]


class _Attempts:
    """Plans candidates, and records the outcomes.

    Attributes:
        expected: Estimated number of attempts, for progress.
        least: The fastest pipeline so far.
    """

    def __init__(
        self,
        plan: Callable[[Candidate, Schedule, float], PipelinePlan],
        apart: Callable[[PipelinePlan | None], int],
        goal: Goal,
        budget: float,
        known: float,
        report: Report,
        found: Stages,
    ):
        """`apart`: `parts_apart` as a function of a pipeline; None: it does not fit."""
        self._plan, self._apart = plan, apart
        self._goal, self._budget, self._report, self._found = goal, budget, report, found
        self._known, self._least_seconds = known, math.inf
        self._seconds: dict[Candidate, float] = {}
        self._busy: dict[Candidate, float] = {}
        self.least: PipelinePlan | None = None
        self.expected, self._made = 1, 0

    def make_all(self, candidates: Iterable[Candidate], schedule: str) -> None:
        """Plan candidates under a schedule; then the fastest of those that do not fit or recompute loops over layers again,
        with each layer by itself (`parts.py`)."""
        made = {candidate: self.make(candidate, schedule) for candidate in candidates}
        planned = [(candidate, *outcome) for candidate, outcome in made.items() if outcome is not None]
        again = [(candidate, plan, self._apart(plan)) for candidate, plan in planned if not candidate.parts]
        again = [each for each in again if each[2] and not _is_apart(*each)]
        again.sort(key=lambda each: self._seconds.get(each[0], math.inf))
        fits = any(plan is not None for _, plan, _ in again)
        for candidate, _, parts in again[:1] if fits else again[: TUNING.finalists]:
            self.make(dataclasses.replace(candidate, firsts=None, parts=parts), schedule)

    def make(self, candidate: Candidate, schedule: str) -> tuple[PipelinePlan | None] | None:
        """Plan a candidate under a schedule, and record the outcome.

        Returns a tuple with the plan, or with None if it does not fit; None: it was left out, or is impossible.
        """
        text = candidate.text(schedule)
        beat = self.beat
        gap = self._found.best.gap if self._found.best is not None else math.nan
        self._report(f"planning {text}", self._made / max(self.expected, self._made + 1), beat, gap)
        self._made += 1
        # Busy seconds under another schedule are a better bound than the table's.
        least = min(candidate.least, self._busy.get(candidate, math.inf))
        if not dataclasses.replace(candidate, least=least).may_beat(beat):
            self._found.tried.append((text, f"left out: about {least:.3e} s at least"))
            return None
        self._found.near = True
        try:
            made = self._plan(candidate, SCHEDULES[schedule], beat)
        except AutoparError as error:
            self._found.tried.append((text, error.summary))
            does_not_fit = isinstance(error, InfeasibleError) and not isinstance(error, SlowerError)
            return (None,) if does_not_fit else None
        fits, seconds = made.peak_bytes <= self._budget, made.seconds_for(self._goal)
        self._found.tried.append((text, f"{'' if fits else 'at least '}{seconds:.3e} s"))
        self._seconds[candidate] = min(seconds, self._seconds.get(candidate, math.inf))
        self._busy[candidate] = min(seconds * (1 - made.waiting_share), self._busy.get(candidate, math.inf))
        if seconds < self._least_seconds:
            self._least_seconds, self.least = seconds, made
            self._found.best = made if seconds < self._known else self._found.best
        return (made,)

    @property
    def beat(self) -> float:
        """Seconds of the best step known, pipeline or not."""
        return min(self._known, self._least_seconds)

    @property
    def waits(self) -> bool:
        """Whether devices wait much in the fastest pipeline."""
        return self.least is not None and self.least.waiting_share > TUNING.much_waiting

    def fastest(self, count: int) -> list[Candidate]:
        """The `count` fastest candidates."""
        return sorted(self._seconds, key=lambda candidate: self._seconds[candidate])[:count]


def _try_too_large(
    attempts: _Attempts,
    estimates: Estimates,
    counts: Sequence[int],
    candidates: Sequence[Candidate],
    effort: int,
    schedule: str,
) -> None:
    """Try candidates that do not fit by the table's estimate: if nothing fits, those that need least; then fast ones.

    `candidates` fit by the table; the first `effort` of them were planned.
    """
    roomy, planned = dataclasses.replace(estimates, budget=math.inf), list(candidates[:effort])
    if math.isinf(attempts.beat):
        frugal = [each for each in equal_candidates(roomy, counts[-1]) if each not in planned]
        attempts.make_all(frugal, schedule)
        planned += frugal
    seen = {(each.count, each.sizes) for each in planned if each.firsts is None}
    others = [each for count in counts for each in equal_candidates(roomy, count) if each not in candidates]
    faster = [each for each in others if each.seconds < attempts.beat and (each.count, each.sizes) not in seen]
    attempts.make_all(sorted(faster, key=lambda each: each.seconds)[: effort // TUNING.roomy_finalists], schedule)


def _is_apart(candidate: Candidate, planned: PipelinePlan | None, parts: int) -> bool:
    """Whether a candidate was planned with so many parts, and balanced borders, already."""
    return planned is not None and planned.cut.stacks.count == parts and candidate.firsts is None


def _try_schedules(attempts: _Attempts, effort: int) -> None:
    """Try the fastest candidates under zero-bubble schedules, and if devices wait much, under those that keep or send more."""
    attempts.make_all(attempts.fastest(max(1, effort // 4)), "zb-h1")
    for schedule in KEEPING:
        attempts.make_all(attempts.fastest(1) if attempts.waits else (), schedule)
    for schedule in CHUNKED:
        if not attempts.waits:
            break
        before = attempts.least
        attempts.make_all(attempts.fastest(1), schedule)
        if attempts.least is before:  # sending more outweighs waiting less
            break


def _try_finer_meshes(attempts: _Attempts, cluster: Cluster, wide: bool, schedule: str) -> None:
    """Try the fastest candidate with more logical meshes for its stages; `wide` as in `finer_meshes`."""
    for candidate in attempts.fastest(1):
        finer = {size: finer_meshes(cluster, size, wide) for size in candidate.sizes}
        meshes = tuple((*own, *finer[size]) for own, size in zip(candidate.meshes, candidate.sizes, strict=True))
        if meshes != candidate.meshes:
            attempts.make(dataclasses.replace(candidate, meshes=meshes), schedule)


def _counts(request: Request) -> list[int]:
    least, most = TUNING.fewest_microbatches, TUNING.most_microbatches
    return request.microbatch_counts(least, most) or request.microbatch_counts(most=least) or [1]


def _plan(
    cuts: _Cuts, terms: Terms, candidate: Candidate, schedule: Schedule, layers: Sequence[int], beat: float
) -> PipelinePlan:
    """Plan a candidate; `layers`: first segment of each layer of the table, `beat` as in `plan_pipeline`."""
    chunks, firsts = num_chunks(schedule), candidate.firsts
    num_stages = len(candidate.sizes) * chunks
    anew = firsts is None or chunks > 1
    cut = cuts.of(candidate.count, (candidate.parts or num_stages) if anew else 0)
    check_stage_count(cut, num_stages, chunks)

    def plan(borders: tuple[int, ...]) -> PipelinePlan:
        return plan_pipeline(cut, borders, candidate.meshes * chunks, schedule, terms, beat=beat)

    if anew:
        sizes = candidate.sizes * chunks
        even = cuts.weighed(cut, min(sizes), terms.cluster.device)
        parts = even_parts(even, num_stages)
        if not candidate.parts and parts != cut.stacks.count:
            cut = cuts.of(candidate.count, parts)
            even = cuts.weighed(cut, min(sizes), terms.cluster.device)
        return in_fastest_borders(even, sizes, schedule, terms, plan, beat)
    return plan(tuple(layers[first] for first in firsts or ()))
