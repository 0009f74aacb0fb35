"""The search over pipelines: stages, submeshes, logical shapes, microbatches and schedule together.

In:     a traced step, the cluster, options, the best step known without stages.
Out:    the best `PipelinePlan`, and what was tried; `search/planner.py` compares it with the plans without stages.
Method: coarse to fine. The step is cut into a chain of layers of like work, at places where little crosses. Submeshes on which
        one layer alone would take longer than the best step known are left out; on the others a table tells what stages of
        these layers take (`layer_costs.py`, `table.py`). The best few of what it suggests (`candidates.py`) that may beat
        the best step are then sharded as they are, emitted, checked and simulated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from autopar.errors import AutoparError, BatchError, MicrobatchError
from autopar.inter_op.chain import balanced_borders, layer_borders
from autopar.inter_op.cut import CutStep, check_stage_count, cut_step
from autopar.inter_op.weigh import weigh_segments
from autopar.ir.program import Program
from autopar.ir.split.layers import layer_count
from autopar.ir.trace.state import Roles
from autopar.mesh import Cluster
from autopar.options import Goal, Options
from autopar.search.candidates import Candidate, equal_candidates, find_candidates
from autopar.search.layer_costs import LayerCosts, submesh_sizes
from autopar.search.parts import even_parts, parts_apart
from autopar.search.pipeline import plan_pipeline
from autopar.search.progress import Report, part_of, silent
from autopar.search.solve_stages import Solved
from autopar.streams.assemble import PipelinePlan, all_lowered
from autopar.streams.schedules import SCHEDULES, Schedule, num_chunks

MAX_LAYERS = 16
"""Of how many equal layers each has a share of the work; more parts of it than these are interpolated."""
LAYERS_SHARE = 0.4
"""Part of the search that costs of layers take, for progress."""
LAYER_SLACK = 0.35
"""Layers may be so uneven, that more of them are equal."""
FEW = (1, 2)
COUNTS = (4, 8, 16, 32, 64, 128)
"""Numbers of microbatches that are tried, if they divide the batch; a few only without a backward pass."""
FIRST_SCHEDULE, FORWARD_ONLY = "1f1b", "inference"
"""With a backward pass, and without."""
CALLS = 64
"""Calls in a row that stand for many: where calls do not wait for each other, a pipeline fills once for all of them."""
FINALISTS = 2
"""At least so many of the best pipelines of the table are planned as they are; of small programs more."""
MUCH_WAITING = 0.03
"""Where devices wait longer than this part of a step, the schedules that send or keep more for it are tried too."""
EFFORT = 6000
"""As many as this many equations allow, each pipeline planned again counting the program's."""
MOST = 16
DOUBT = 0.1
"""The table may be wrong by this part: what it says to take longer at least than the best step known by more is left out."""
GENEROUS = 4.0
"""Where no step is known that fits: no stage takes so many times as long as if all devices shared all work evenly."""


def search_pipelines(
    program: Program,
    roles: Roles,
    cluster: Cluster,
    options: Options,
    report: Report = silent,
    known: float = math.inf,
) -> tuple[PipelinePlan | None, list[tuple[str, str]]]:
    """The best pipeline that the search finds.

    Args:
        program: The step.
        roles: Its roles.
        cluster: The machine.
        options: Solver, time limit, memory budget, recomputation.
        report: Told of progress.
        known: Seconds of the best step known without stages.

    Returns:
        The pipeline (None: none fits, none is faster, or the step cannot be cut), and (what was tried, its time or why not).
    """
    tried: list[tuple[str, str]] = []
    batch_sizes = [program.in_avals[k].shape[0] for k in roles.batch]
    counts = _counts(batch_sizes)
    reference = counts[len(counts) // 2]
    cuts: dict[tuple[int, int], CutStep] = {}
    length = layer_count(program.jaxpr, roles.state, roles.aliases)
    fine = layer_parts(length)

    def cut_for(count: int, parts: int = fine) -> CutStep:
        # Only scans over layers are taken into parts.
        key = parts if length else 0, count
        if key not in cuts:
            cuts[key] = cut_step(program, roles, parts, count, options.microbatch_semantics)
        return cuts[key]

    report("cutting the step into layers", 0.0, known)
    try:
        cut = cut_for(reference)
    except (MicrobatchError, BatchError) as error:
        tried.append((f"{reference} microbatches", error.summary))
        counts, reference = [1], 1
        cut = cut_for(1)
    forward_only = not any(cut.chain.backward)
    first = FORWARD_ONLY if forward_only else FIRST_SCHEDULE
    if forward_only:  # nothing is added up over microbatches, and the pipeline fills at once
        few = [m for m in FEW if all(size % m == 0 for size in batch_sizes) and m not in counts]
        counts = [*few, *counts]
    calls = CALLS if options.goal == "calls" else 1
    # The same segments make a layer for every number of microbatches: what they do does not depend on it.
    chain = weigh_segments(cut, 1, cluster.device).chain
    borders = layer_borders(chain, MAX_LAYERS, LAYER_SLACK)
    if len(borders) < 2:
        return None, tried
    budget = options.memory_budget_bytes or cluster.device.memory_bytes
    work = np.add.reduceat(chain.work, borders)
    sizes = _worthy_sizes(work * reference, cluster, known, tried)
    solved = Solved()
    telling = part_of(report, 0.0, LAYERS_SHARE)
    layers = LayerCosts(cut_for, borders, work, sizes, batch_sizes, counts, cluster, options, solved, telling)
    crossing = reference * _transfers([cut.chain.cut_bytes[k] for k in borders], cluster)
    finalists = max(FINALISTS, min(MOST, EFFORT // max(1, len(cut.program.jaxpr.eqns))))
    most_stages = max(cut.chain.num_segments, length)
    candidates = find_candidates(layers, counts, crossing, cluster, budget, finalists // 2, most_stages, calls)

    def plan(candidate: Candidate, schedule: Schedule, beat: float) -> PipelinePlan:
        return _plan(cut_for, cluster, options, candidate, schedule, borders, solved, beat)

    attempts = _Attempts(plan, options.goal, budget, known, part_of(report, LAYERS_SHARE, 1.0), tried)
    attempts.expected = min(finalists, len(candidates)) + max(1, finalists // 4) + 2
    for candidate in candidates[:finalists]:
        attempts.make(candidate, first)
    if attempts.best is None and math.isinf(known):
        # The table's memory is an estimate: what takes least of it may fit after all.
        for candidate in equal_candidates(layers, crossing * 0, counts[-1], cluster, math.inf, most_stages):
            if candidate not in candidates[:finalists]:
                attempts.make(candidate, first)
    parts = parts_apart(program, roles, attempts.best)
    for candidate in (attempts.fastest(1) or candidates[:FINALISTS]) if parts else ():
        attempts.make(dataclasses.replace(candidate, firsts=None, parts=parts), first)
    for candidate in () if forward_only else attempts.fastest(max(1, finalists // 4)):
        attempts.make(candidate, "zb-h1")
    if not forward_only and attempts.waiting_share > MUCH_WAITING:
        for candidate in attempts.fastest(1):
            attempts.make(candidate, "gpipe")
            attempts.make(candidate, "interleaved")
    return attempts.best and all_lowered(attempts.best, cluster), tried


def layer_parts(length: int) -> int:
    """Into how many parts scans over so many layers are taken: equal ones, if these are at least half as many as may be."""
    equal = next((n for n in range(min(length, MAX_LAYERS), MAX_LAYERS // 2 - 1, -1) if length % n == 0), 0)
    return equal or min(length, MAX_LAYERS)


def _worthy_sizes(work: np.ndarray, cluster: Cluster, known: float, tried: list[tuple[str, str]]) -> list[int]:
    """Devices that a stage may have: so many that a typical layer, shared among them, takes less than the best step known.

    Args:
        work: Of each layer, seconds of a step on one device.
        cluster: The machine.
        known: Seconds of the best step known.
        tried: Extended.
    """
    least = float(np.median(work))
    limit = known if math.isfinite(known) else GENEROUS * float(work.sum()) / cluster.num_devices
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
    """Pipelines that have been planned.

    Attributes:
        best: The fastest; None: none fits, or is faster than the best step known.
        expected: About how many there will be.
        waiting_share: Of the fastest, as of `PipelinePlan`.
    """

    def __init__(
        self,
        plan: Callable[[Candidate, Schedule, float], PipelinePlan],
        goal: Goal,
        budget: float,
        known: float,
        report: Report,
        tried: list[tuple[str, str]],
    ):
        self._plan, self._goal, self._budget, self._report, self._tried = plan, goal, budget, report, tried
        self._known, self._least = known, math.inf
        self._seconds: dict[Candidate, float] = {}
        self.best: PipelinePlan | None = None
        self.expected, self._made, self.waiting_share = 1, 0, 0.0

    def make(self, candidate: Candidate, schedule: str) -> None:
        """Plan a candidate under a schedule; what became of it is noted."""
        text = candidate.text(schedule)
        beat = min(self._known, self._least)
        self._report(f"planning {text}", self._made / max(self.expected, self._made + 1), beat)
        self._made += 1
        if candidate.least * (1 - DOUBT) >= beat:
            self._tried.append((text, f"left out: about {candidate.least:.3e} s at least"))
            return
        try:
            made = self._plan(candidate, SCHEDULES[schedule], beat)
        except AutoparError as error:
            self._tried.append((text, error.summary))
            return
        fits = made.peak_bytes <= self._budget
        seconds = made.seconds_for(self._goal)
        self._tried.append((text, f"{'' if fits else 'at least '}{seconds:.3e} s"))
        self._seconds[candidate] = min(seconds, self._seconds.get(candidate, math.inf))
        if seconds < self._least:
            self._least, self.waiting_share = seconds, made.waiting_share
            self.best = made if seconds < self._known else self.best

    def fastest(self, count: int) -> list[Candidate]:
        """The candidates that were fastest."""
        return sorted(self._seconds, key=lambda candidate: self._seconds[candidate])[:count]


def _counts(batch_sizes: Sequence[int]) -> list[int]:
    found = [m for m in COUNTS if batch_sizes and all(size % m == 0 for size in batch_sizes)]
    if found:
        return found
    every = [m for m in range(2, 129) if batch_sizes and all(size % m == 0 for size in batch_sizes)]
    return every[-3:] or [1]


def _transfers(crossing_bytes: Sequence[float], cluster: Cluster) -> np.ndarray:
    """Seconds per microbatch to bring what crosses each border over it, between hosts, all devices of a host at once."""
    link, lanes = cluster.inter, cluster.devices_per_host
    return 2 * link.latency_seconds + np.array(crossing_bytes) / lanes / link.bytes_per_second


def _plan(
    cut_for: Callable[..., CutStep],
    cluster: Cluster,
    options: Options,
    candidate: Candidate,
    schedule: Schedule,
    layers: Sequence[int],
    solved: Solved,
    beat: float,
) -> PipelinePlan:
    """Plan a candidate as it is; `layers` are their first segments, `beat` is as of `plan_pipeline`."""
    chunks, firsts = num_chunks(schedule), candidate.firsts
    num_stages = len(candidate.sizes) * chunks
    anew = firsts is None or chunks > 1
    cut = cut_for(candidate.count, candidate.parts or num_stages) if anew else cut_for(candidate.count)
    check_stage_count(cut, num_stages, chunks)
    if anew:
        sizes = candidate.sizes * chunks
        even = weigh_segments(cut, min(sizes), cluster.device)
        parts = even_parts(even, num_stages)
        if not candidate.parts and parts != cut.stacks.count:
            cut = cut_for(candidate.count, parts)
            even = weigh_segments(cut, min(sizes), cluster.device)
        borders = balanced_borders(even.chain, num_stages, shares=sizes)
    else:
        borders = tuple(layers[first] for first in firsts or ())
    return plan_pipeline(cut, borders, candidate.meshes * chunks, cluster, schedule, options, solved, beat=beat)
