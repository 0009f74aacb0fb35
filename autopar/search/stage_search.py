"""The search over pipelines: stages, submeshes, logical shapes, microbatches and schedule together.

In:     a traced step, the cluster, options.
Out:    the best `PipelinePlan`, and what was tried; `search/planner.py` compares it with the plans without stages.
Method: the step is cut into a chain of layers of like work, at places where little crosses. A table tells what stages of
        these layers take (`layer_costs.py`, `table.py`). The DP of `inter_op/slicing.py` picks stages for each number of
        microbatches; the best few are then sharded as they are, emitted, checked and simulated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.errors import AutoparError, BatchError, InfeasibleError, MicrobatchError
from autopar.inter_op.chain import balanced_borders
from autopar.inter_op.cut import CutStep, check_stage_count, cut_step, dividing_count
from autopar.inter_op.slicing import slice_stages
from autopar.ir.program import Program
from autopar.ir.split.layers import layer_count
from autopar.ir.trace.state import Roles
from autopar.mesh import Cluster, LogicalMesh
from autopar.options import Goal, Options
from autopar.search.layer_costs import LayerCosts
from autopar.search.parts import parts_apart
from autopar.search.pipeline import plan_pipeline
from autopar.search.progress import Report, part_of, silent
from autopar.search.solve_stages import Solved
from autopar.search.table import Kinds, kinds_of
from autopar.streams.assemble import PipelinePlan
from autopar.streams.schedules import SCHEDULES, Schedule, num_chunks

MAX_LAYERS = 16
LAYERS_SHARE = 0.3
"""Part of the search that costs of layers take, for progress."""
LAYER_SLACK = 0.35
"""Layers may be so uneven, that more of them are equal."""
FEW = (1, 2)
COUNTS = (4, 8, 16, 32, 64, 128)
"""Numbers of microbatches that are tried, if they divide the batch; a few only without a backward pass."""
FINALISTS = 2
"""At least so many of the best pipelines of the table are planned as they are; of small programs more."""
MOST_SOLVED = 8
"""So many candidates at most have their layers sharded for their number of microbatches, where scaling only guesses."""
FIRST_SCHEDULE, FORWARD_ONLY = "1f1b", "inference"
"""With a backward pass, and without."""
CALLS = 64
"""Calls in a row that stand for many: where calls do not wait for each other, a pipeline fills once for all of them."""
MUCH_WAITING = 0.1
"""Where devices wait longer than this part of a step, the schedules that send or keep more for it are tried too."""
EFFORT = 6000
"""As many as this many equations allow, each pipeline planned again counting the program's."""
MOST = 16


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A pipeline to be planned.

    Attributes:
        count: Number of microbatches.
        seconds: What the table says of it.
        sizes: Devices of each stage.
        firsts: First layer of each stage; None: balanced anew, as many parts of a scan as stages.
        meshes: Of each stage, the logical meshes to try.
        parts: So many parts of a scan instead; 0: not.
    """

    count: int
    seconds: float
    sizes: tuple[int, ...]
    firsts: tuple[int, ...] | None
    meshes: tuple[tuple[LogicalMesh, ...], ...]
    parts: int = 0


def search_pipelines(
    program: Program, roles: Roles, cluster: Cluster, options: Options, report: Report = silent
) -> tuple[PipelinePlan | None, list[tuple[str, str]]]:
    """The best pipeline that the search finds.

    Returns:
        The pipeline (None: none fits, or the step cannot be cut), and (what was tried, its time or why not).
    """
    tried: list[tuple[str, str]] = []
    batch_sizes = [program.in_avals[k].shape[0] for k in roles.batch]
    counts = _counts(batch_sizes)
    reference = counts[len(counts) // 2]
    cuts: dict[tuple[int, int], CutStep] = {}
    length = layer_count(program.jaxpr, roles.state, roles.aliases)
    fine = dividing_count(length, MAX_LAYERS)

    def cut_for(count: int, parts: int = fine) -> CutStep:
        # Only scans over layers are taken into parts.
        key = parts if length else 0, count
        if key not in cuts:
            cuts[key] = cut_step(program, roles, parts, count, options.microbatch_semantics)
        return cuts[key]

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
    num_layers = min(MAX_LAYERS, cut.chain.num_segments)
    if num_layers < 2:
        return None, tried
    solved = Solved()
    # The same segments make a layer for every number of microbatches: what they do does not depend on it.
    borders = balanced_borders(cut.chain, num_layers, LAYER_SLACK)
    layers = LayerCosts(
        cut_for, borders, batch_sizes, counts, cluster, options, solved, part_of(report, 0.0, LAYERS_SHARE)
    )
    crossing = reference * _transfers([cut.chain.cut_bytes[k] for k in borders], cluster)
    finalists = max(FINALISTS, min(MOST, EFFORT // max(1, len(cut.program.jaxpr.eqns))))
    candidates = _without_guesses(layers, counts, crossing, cluster, options, finalists)

    def plan(candidate: _Candidate, schedule: Schedule, beat: float) -> PipelinePlan:
        return _plan(cut_for, cluster, options, candidate, schedule, borders, solved, beat)

    attempts = _Attempts(
        plan,
        options.goal,
        options.memory_budget_bytes or cluster.device.memory_bytes,
        part_of(report, LAYERS_SHARE, 1.0),
        tried,
    )
    attempts.expected = min(finalists, len(candidates)) + max(1, finalists // 4) + 2
    for candidate in candidates[:finalists]:
        attempts.make(candidate, first)
    if attempts.best is None:
        # The table's memory is an estimate: what takes least of it may fit after all.
        kinds, nothing = kinds_of(layers, counts[-1], np.inf), np.zeros(num_layers)
        for candidate in _equal_stages(layers, kinds, nothing, counts[-1], cluster):
            if candidate not in candidates[:finalists]:
                attempts.make(candidate, first)
    parts = parts_apart(program, roles, attempts.best)
    for candidate in (attempts.fastest(1) or candidates[:FINALISTS]) if parts else ():
        attempts.make(dataclasses.replace(candidate, firsts=None, parts=parts), first)
    if forward_only:
        return attempts.best, tried
    for candidate in attempts.fastest(max(1, finalists // 4)):
        attempts.make(candidate, "zb-h1")
    if attempts.best is not None and attempts.best.waiting_share > MUCH_WAITING:
        for candidate in attempts.fastest(1):
            attempts.make(candidate, "gpipe")
            attempts.make(candidate, "interleaved")
    return attempts.best, tried


class _Attempts:
    """Pipelines that have been planned.

    Attributes:
        best: The fastest; None: none fits.
        expected: About how many there will be.
    """

    def __init__(
        self,
        plan: Callable[[_Candidate, Schedule, float], PipelinePlan],
        goal: Goal,
        budget: float,
        report: Report,
        tried: list[tuple[str, str]],
    ):
        self._plan, self._goal, self._budget, self._report, self._tried = plan, goal, budget, report, tried
        self._seconds: dict[_Candidate, float] = {}
        self.best: PipelinePlan | None = None
        self.expected, self._made = 1, 0

    def make(self, candidate: _Candidate, schedule: str) -> None:
        """Plan a candidate under a schedule; what became of it is noted."""
        text = _text(candidate, schedule)
        beat = self.best.seconds_for(self._goal) if self.best is not None else np.inf
        self._report(f"planning {text}", self._made / max(self.expected, self._made + 1), beat)
        self._made += 1
        try:
            made = self._plan(candidate, SCHEDULES[schedule], beat)
        except AutoparError as error:
            self._tried.append((text, error.summary))
            return
        fits = made.peak_bytes <= self._budget
        seconds = made.seconds_for(self._goal)
        self._tried.append((text, f"{'' if fits else 'at least '}{seconds:.3e} s"))
        self._seconds[candidate] = min(seconds, self._seconds.get(candidate, np.inf))
        if seconds < beat:
            self.best = made

    def fastest(self, count: int) -> list[_Candidate]:
        """The candidates that were fastest."""
        return sorted(self._seconds, key=lambda candidate: self._seconds[candidate])[:count]


def _counts(batch_sizes: Sequence[int]) -> list[int]:
    found = [m for m in COUNTS if batch_sizes and all(size % m == 0 for size in batch_sizes)]
    if found:
        return found
    every = [m for m in range(2, 129) if batch_sizes and all(size % m == 0 for size in batch_sizes)]
    return every[-3:] or [1]


def _without_guesses(
    layers: LayerCosts, counts: Sequence[int], crossing: np.ndarray, cluster: Cluster, options: Options, finalists: int
) -> list[_Candidate]:
    """Candidates, best first; those that rest on guesses last.

    A guess is on the fast side: it is solved as long as it stands among the best half of the finalists.
    """
    slicings = {count: _slicings(layers, count, crossing / count, cluster, options) for count in counts}

    def guessed(candidate: _Candidate) -> list[int]:
        return [size for size in dict.fromkeys(candidate.sizes) if layers.is_guess(size, candidate.count)]

    for solved in range(MOST_SOLVED + 1):
        ranked = sorted((c for some in slicings.values() for c in some), key=lambda c: c.seconds)
        unsure = next((c for c in ranked[: finalists // 2] if guessed(c)), None)
        if unsure is None or solved == MOST_SOLVED:
            break
        for size in guessed(unsure):
            layers.solve(size, unsure.count)
        slicings[unsure.count] = _slicings(layers, unsure.count, crossing / unsure.count, cluster, options)
    return sorted(ranked, key=lambda c: bool(guessed(c)))


def _slicings(
    layers: LayerCosts, count: int, crossing: np.ndarray, cluster: Cluster, options: Options
) -> list[_Candidate]:
    """The best slicing for a number of microbatches, and some that one would write by hand."""
    kinds = kinds_of(layers, count, options.memory_budget_bytes or cluster.device.memory_bytes)
    calls = CALLS if options.goal == "calls" else 1
    found = _equal_stages(layers, kinds, crossing, count, cluster, calls)
    # Also the best one that runs nothing more again: what recomputation takes is known only when it is planned.
    for some in (kinds, kinds.first(len(layers.meshes)))[: len(layers.levels)]:
        best = _best_slicing(some, crossing, count, cluster, calls)
        found += [best] if best is not None else []
    # Equal stages tried on all their meshes stand for the same stages on one.
    return list({(c.sizes, c.firsts): c for c in reversed(found)}.values())


def _best_slicing(kinds: Kinds, crossing: np.ndarray, count: int, cluster: Cluster, calls: int) -> _Candidate | None:
    """The slicing of least latency of so many calls in a row, by the table; None: none fits."""
    try:
        slicing = slice_stages(
            kinds.seconds,
            kinds.sizes,
            cluster.num_devices,
            count * calls,
            transfer_seconds=crossing,
            max_in_flight=kinds.flight,
            gap=0.02,
        )
    except InfeasibleError:
        return None
    stages = slicing.stages
    alike = len({s.last - s.first for s in stages}) == 1
    return _Candidate(
        count,
        slicing.latency_seconds / calls,
        tuple(kinds.sizes[s.submesh] for s in stages),
        None if alike else tuple(s.first for s in stages),
        tuple((kinds.meshes[s.first, s.last, s.submesh],) for s in stages),
    )


def _equal_stages(
    layers: LayerCosts, kinds: Kinds, crossing: np.ndarray, count: int, cluster: Cluster, calls: int = 1
) -> list[_Candidate]:
    """Pipelines of equally many layers on equal submeshes, as one would write them by hand."""
    num_layers, found = layers.num_layers, []
    for size, shapes in layers.meshes.items():
        num_stages = cluster.num_devices // size
        if cluster.num_devices % size or not 2 <= num_stages <= num_layers:
            continue
        firsts = [round(k * num_layers / num_stages) for k in range(num_stages)]
        lasts = [first - 1 for first in firsts[1:]] + [num_layers - 1]
        times = []
        for k, (a, b) in enumerate(zip(firsts, lasts, strict=True)):
            fitting = (kinds.flight[a, b] >= min(count, num_stages - k)) & (np.array(kinds.sizes) == size)
            times.append(float(np.where(fitting, kinds.seconds[a, b], np.inf).min()))
        if np.isfinite(times).all():
            latency = sum(times) + (count * calls - 1) * max(times) + sum(float(crossing[a]) for a in firsts[1:])
            found.append(_Candidate(count, latency / calls, (size,) * num_stages, None, (tuple(shapes),) * num_stages))
    return found


def _transfers(crossing_bytes: Sequence[float], cluster: Cluster) -> np.ndarray:
    """Seconds per microbatch to bring what crosses each border over it, between hosts, all devices of a host at once."""
    link, lanes = cluster.inter, cluster.devices_per_host
    return 2 * link.latency_seconds + np.array(crossing_bytes) / lanes / link.bytes_per_second


def _plan(
    cut_for: Callable[..., CutStep],
    cluster: Cluster,
    options: Options,
    candidate: _Candidate,
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
    borders = balanced_borders(cut.chain, num_stages) if anew else tuple(layers[first] for first in firsts or ())
    return plan_pipeline(cut, borders, candidate.meshes * chunks, cluster, schedule, options, solved, beat=beat)


def _text(candidate: _Candidate, schedule: str) -> str:
    sizes = "+".join(map(str, candidate.sizes))
    apart = ", layers in no loop" if candidate.parts else ""
    return f"{len(candidate.sizes)} stages on {sizes}, {candidate.count} microbatches, {schedule}{apart}"
