"""Searches for a number of microbatches on one mesh that makes the step faster, or makes it fit (gradient accumulation).

In:     the plans found for the step with its whole batch (`meshes.py`).
Out:    `Accumulated`: the step in microbatches, their number, and the plans found for it.
Method: microbatches take less memory, but repeat collectives and small operations. So they are tried if memory binds:
        nothing fits, or the best plan was chosen to fit and is slower than without a budget. Numbers about double each
        time, from the least that may fit, on the meshes that were best so far, until the step is no faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.errors import AutoparError, needed_bytes
from autopar.intra_op.exposure import Exposure
from autopar.intra_op.problem import planning_seconds
from autopar.ir.program import Program
from autopar.mesh import LogicalMesh
from autopar.search.meshes import Searched, search_meshes
from autopar.search.one_mesh import in_microbatches
from autopar.search.progress import Report
from autopar.search.request import Request
from autopar.tuning import TUNING


@dataclass(frozen=True, slots=True)
class Accumulated:
    """A step in microbatches on one mesh.

    Attributes:
        count: Number of microbatches.
        program: The step, rewritten to a loop over them.
        searched: The plans found for it.
    """

    count: int
    program: Program
    searched: Searched


def search_accumulation(
    request: Request, meshes: list[LogicalMesh], whole: Searched, report: Report
) -> Iterator[Accumulated]:
    """Yield steps in more than one microbatch, each faster than the one before and than `whole`; extends `whole.tried`."""
    if not memory_binds(whole) or not repays_room(request, whole):
        return

    def told(text: str, done: float | None = None, best: float = math.inf, gap: float = math.nan) -> None:
        # The best for a number of microbatches counts once all its meshes are tried.
        known = found.searched if found else whole
        report(text, done, least, known.best.gap if known.results else math.nan)

    found: Accumulated | None = None
    least = min((sharded.step_seconds for sharded in whole.results), default=math.inf)
    needed = needed_bytes(whole.failure)
    for count in request.microbatch_counts(shared=True):
        if not whole.results and needed > count * request.budget_bytes and math.isfinite(needed):
            continue  # memory shrinks at most in proportion to the microbatch
        try:
            how = count, request.options.microbatch_semantics, request.cluster.num_devices
            split = in_microbatches(request.program, request.roles, *how)
        except AutoparError as error:
            whole.tried.append((f"{count} microbatches", error.summary))
            break
        searched = Searched([], [])
        beat, exposure = _to_beat(found or whole, count, request)
        search_meshes(request.of(split), best_meshes(meshes, found or whole), told, searched, beat, exposure)
        whole.tried += [(f"{name}, {count} microbatches", outcome) for name, outcome in searched.tried]
        if searched.pruned and not searched.results:
            break
        if not searched.results:
            before, needed = needed, needed_bytes(searched.failure)
            if needed > (1 - TUNING.accumulation_bytes) * before:  # the rest does not shrink: parameters, gradients
                break
            continue
        seconds = searched.best.step_seconds
        if seconds >= least:
            break
        found, least = Accumulated(count, split, searched), seconds
        yield found
        if not memory_binds(searched):
            break


def repays_room(request: Request, known: Searched) -> bool:
    """Whether what memory costs a step is likely to repay another search, or nothing fits without."""
    if not known.results:
        return True
    best = known.best
    won = TUNING.hoped * (best.step_seconds - best.shared_seconds)
    return request.options.repays(won, planning_seconds(best.problem))


def _to_beat(known: Searched | Accumulated, count: int, request: Request) -> tuple[float, Exposure | None]:
    """The objective that another number of microbatches has to beat, and a guess of the exposure there."""
    before, searched = (known.count, known.searched) if isinstance(known, Accumulated) else (1, known)
    least, exposure = request.beat, None
    if searched.results:
        # Not by the exposure of the best program alone: the others would be priced otherwise than what they have to beat.
        best = searched.best.as_compared(request.cluster.device)
        exposure = None if best.exposure is None else best.exposure.in_microbatches(before, count)
        least = min(least, max(best.step_seconds, best.solution.objective))
    return (1 + TUNING.exposure_guessed) * least, exposure


def memory_binds(searched: Searched) -> bool:
    """Whether more memory might have given a faster plan, or any: the best plan has memory rows, or there is none."""
    return not searched.results or bool(searched.best.problem.rows)


def best_meshes(meshes: list[LogicalMesh], known: Searched | Accumulated) -> list[LogicalMesh]:
    """The meshes with the fastest plans; the first of `meshes` if there are no plans."""
    searched = known.searched if isinstance(known, Accumulated) else known
    order = sorted(searched.results, key=lambda sharded: sharded.step_seconds)
    return [sharded.mesh for sharded in order[: TUNING.accumulation_meshes]] or meshes[: TUNING.accumulation_meshes]
