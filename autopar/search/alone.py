"""One stage on all devices: gradients accumulated, and as much of the forward pass recomputed as memory demands.

In:     a traced step, the meshes that were best without; where memory binds.
Out:    `Stages`: the fastest such step, if it is faster than what is known, and what was tried.
Method: a pipeline of one stage, which no one waits for: its backward pass is a program of its own, and may recompute what
        it would else have to find. In one microbatch, then about twice as many each time, until more are no faster, or
        need about as many bytes as half as many, too many: what is left is no sample's.
"""

from __future__ import annotations

import dataclasses
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
    """Plan the step as one stage on one of the meshes; extends `found`. `known` is the seconds of the best step so far.

    `accumulated`: in so many microbatches that step is best otherwise; as many are tried, whatever fewer come to.
    """
    failure: AutoparError | None = None
    for count in (1, *request.microbatch_counts(shared=True)):
        text = f"1 stage on {request.cluster.num_devices}, {count} microbatches"
        report(f"planning {text}", None, known)
        try:
            planned = pipeline_under(request, _as_stage(method, count), silent, meshes, known)
        except AutoparError as error:
            found.tried.append((text, error.summary))
            before, failure = failure, error
            if count >= accumulated and _saves_nothing(before, failure):
                return
            continue
        wins = planned.seconds < known
        found.tried.append((text, f"{'' if wins else 'at least '}{planned.seconds:.3e} s"))
        if wins:
            found.best, known = planned, planned.seconds
        elif count >= accumulated and set(planned.tasks.levels) == {CHEAP}:
            return  # more microbatches take longer still, and there is no more that they need not recompute


def _saves_nothing(before: AutoparError | None, after: AutoparError) -> bool:
    """Whether more microbatches need about as many bytes: what is left is no sample's, but of parameters and gradients.

    As far as both errors tell the same: what is proved to be needed says little of the least that was found.
    """
    return type(before) is type(after) and needed_bytes(after) > (1 - TUNING.accumulation_bytes) * needed_bytes(before)


def _as_stage(method: Auto, count: int) -> PipelineParallel:
    """The same settings, of a pipeline of one stage."""
    shared = {f.name for f in dataclasses.fields(method)} & {f.name for f in dataclasses.fields(PipelineParallel)}
    settings = {name: getattr(method, name) for name in sorted(shared)}
    return PipelineParallel(**settings | {"num_stages": 1, "num_microbatches": count})
