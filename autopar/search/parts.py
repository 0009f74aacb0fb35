"""Into how many parts scans over layers are taken, so that stages are even, and fit.

In:     a step that is cut with as many parts as stages; a pipeline of it.
Out:    the number of parts with which the largest stage is nearly as small as it can be; whether layers should stand by
        themselves.
Method: stages begin between parts. With one part for each, what comes before and behind the layers (a large head) is on
        top of the first's and the last's share; with finer parts these get fewer layers. Each part is a loop of its own
        to compile, so the fewest do that serve. A loop runs again only whole: where memory demands that something does,
        layers without loops have the choice of which, and of what in them.
"""

from __future__ import annotations

import numpy as np

from autopar.inter_op.chain import MAX_SEGMENTS, least_largest
from autopar.inter_op.cut import CutStep
from autopar.inter_op.residuals import CHEAP
from autopar.ir.program import Program
from autopar.ir.region import kind_of, trip_count
from autopar.ir.split.layers import layer_count
from autopar.ir.trace.state import Roles
from autopar.streams.assemble import PipelinePlan

MOST_PARTS = 16
TOLERANCE = 0.05
"""How far the largest stage may be over the least that finer parts would make it."""


def even_parts(cut: CutStep, num_stages: int) -> int:
    """How many parts serve; those that the step is cut into, if it is even or nothing would help.

    Args:
        cut: The step, its scans in equal parts.
        num_stages: How many stages it becomes.
    """
    count, chain = cut.stacks.count, cut.chain
    of_length: dict[int, list[int]] = {}
    for eqn, segment, is_behind in zip(chain.loop.eqns, chain.segment, chain.backward, strict=True):
        if kind_of(eqn) == "scan" and not is_behind and segment >= 0:
            of_length.setdefault(trip_count(eqn), []).append(segment)
    if count < 2 or chain.marks or not of_length or num_stages > chain.num_segments:
        return count
    length = max(of_length, key=lambda n: float(chain.work[of_length[n]].sum()))
    finer = [k for k in range(1, length + 1) if length % k == 0 and (k == 1 or count * k <= MOST_PARTS)]
    largest = [_largest(chain.work, dict.fromkeys(of_length[length], k), num_stages) for k in finer]
    serves = min(largest) * (1 + TOLERANCE)
    return count * next(k for k, share in zip(finer, largest, strict=True) if share <= serves)


def parts_apart(program: Program, roles: Roles, planned: PipelinePlan | None) -> int:
    """As many parts as layers, if these are in loops that memory demands to run again; else 0.

    Args:
        program: The step.
        roles: Its roles.
        planned: A pipeline of it; None: none fits.
    """
    length = layer_count(program.jaxpr, roles.state, roles.aliases)
    if length > MAX_SEGMENTS or (planned is not None and planned.cut.stacks.count == length):
        return 0
    return length if planned is None or any(level > CHEAP for level in planned.tasks.levels) else 0


def _largest(work: np.ndarray, pieces: dict[int, int], num_stages: int) -> float:
    """The work of the largest stage, if these segments were so many pieces each."""
    each = [np.full(pieces.get(segment, 1), amount / pieces.get(segment, 1)) for segment, amount in enumerate(work)]
    return least_largest(np.concatenate([[0.0], np.cumsum(np.concatenate(each))]), num_stages)
