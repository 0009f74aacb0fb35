"""Plans the step as one stage on all devices, with gradient accumulation and as much recomputation as memory demands.

In:     a traced step for which memory binds, the meshes that were best so far.
Out:    `Stages`, extended by the fastest such step, if it is faster than the best known, and by what was tried.
Method: a pipeline of one stage has no bubble, and its backward pass is a program of its own, which may recompute residuals.
        The number of microbatches about doubles each time, until the step is no faster, or saves no memory: the rest is
        parameters and gradients.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from autopar.errors import AutoparError, needed_bytes
from autopar.inter_op.residuals import CHEAP
from autopar.mesh import LogicalMesh
from autopar.search.methods import Auto, PipelineParallel
from autopar.search.progress import Report, silent
from autopar.search.request import Request
from autopar.search.stage_planner import pipeline_under
from autopar.search.stage_search import Stages
from autopar.tuning import TUNING


def search_alone(
    request: Request,
    method: Auto,
    meshes: Sequence[LogicalMesh],
    found: Stages,
    report: Report,
    known: float,
    accumulated: int = 1,
) -> None:
    """Plan the step as one stage on one of the meshes; extends `found`. `known`: seconds of the best step so far.

    `accumulated`: the number of microbatches of the best step without a stage; at least as many are tried.
    """
    failure: AutoparError | None = None
    for count in (1, *request.microbatch_counts(shared=True)):
        text = f"1 stage on {request.cluster.num_devices}, {count} microbatches"
        report(f"planning {text}", None, known, math.nan if found.best is None else found.best.gap)
        try:
            planned = pipeline_under(request, _as_stage(method, count), silent, meshes, known)
        except AutoparError as error:
            found.tried.append((text, error.summary))
            before, failure = failure, error.kept()
            if count >= accumulated and _saves_nothing(before, failure):
                return
            continue
        wins = planned.seconds < known
        found.tried.append((text, f"{'' if wins else 'at least '}{planned.seconds:.3e} s"))
        if wins:
            found.best, known = planned, planned.seconds
        elif count >= accumulated and set(planned.tasks.levels) == {CHEAP}:
            return  # more microbatches are slower, and cannot save recomputation


def _saves_nothing(before: AutoparError | None, after: AutoparError) -> bool:
    """Whether more microbatches need about as many bytes, so that the rest is parameters and gradients.

    Only errors of one kind are compared: a proved bound says little about the least that was found.
    """
    return type(before) is type(after) and needed_bytes(after) > (1 - TUNING.accumulation_bytes) * needed_bytes(before)


def _as_stage(method: Auto, count: int) -> PipelineParallel:
    """A pipeline of one stage with the method's settings."""
    shared = {f.name for f in dataclasses.fields(method)} & {f.name for f in dataclasses.fields(PipelineParallel)}
    settings = {name: getattr(method, name) for name in sorted(shared)}
    return PipelineParallel(**settings | {"num_stages": 1, "num_microbatches": count})
