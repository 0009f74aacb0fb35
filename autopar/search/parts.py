"""Chooses the number of parts that scans over layers are split into, so that stages are balanced and fit.

In:     a step that is cut with as many parts as stages; a pipeline of it.
Out:    the number of parts that makes the largest stage nearly as small as possible; whether each layer should be a part.
Method: stages begin between parts. With one part per stage, the first and the last stage have the work before and after the
        layers (a large head) on top of their share; with finer parts they get fewer layers. Each part is a loop to
        compile, so the fewest sufficient parts are taken. A loop is recomputed only as a whole: if memory demands
        recomputation, layers outside of loops allow to choose which, and what in them.
"""

from __future__ import annotations

import numpy as np

from autopar.inter_op.borders import least_largest
from autopar.inter_op.cut import CutStep
from autopar.inter_op.residuals import CHEAP
from autopar.ir.gradient import is_backward, is_recomputed
from autopar.ir.program import Program
from autopar.ir.region import kind_of, region_of, trip_count
from autopar.ir.split.layers.layers import layer_count
from autopar.ir.split.placement import units_of_shard
from autopar.ir.trace.state import Roles
from autopar.ir.work import num_bytes
from autopar.streams.assemble import PipelinePlan
from autopar.tuning import TUNING


def even_parts(cut: CutStep, num_stages: int) -> int:
    """The fewest parts that balance so many stages; the present number, if finer parts do not help."""
    count, length, chain = cut.stacks.count, cut.stacks.length, cut.chain
    sizes = [units_of_shard(k, count, length).size for k in range(count)]
    trips: dict[int, int] = {}  # of the loops over layers, by segment
    for eqn, segment, is_behind in zip(chain.loop.eqns, chain.segment, chain.backward, strict=True):
        if kind_of(eqn) == "scan" and trip_count(eqn) in sizes and not is_behind and segment >= 0:
            trips[segment] = trip_count(eqn)
    if count < 2 or chain.marks or not trips or num_stages > chain.num_segments:
        return count
    finer = _finer(length, count)
    pieces = [{k: _pieces(n, length, count, of_part) for k, of_part in trips.items()} for n in finer]
    largest = [_largest(chain.work, of_segment, num_stages) for of_segment in pieces]
    serves = min(largest) * (1 + TUNING.parts_tolerance)
    return next(n for n, share in zip(finer, largest, strict=True) if share <= serves)


def parts_apart(program: Program, roles: Roles, planned: PipelinePlan | None) -> int:
    """The number of layers, if memory demands recomputation and loops over layers keep values that it could save; else 0.

    `planned`: a pipeline of the step; None: none fits.
    """
    length = layer_count(program.jaxpr, roles.may_hold_layers, roles.aliases)
    runs_again = planned is None or any(level > CHEAP for level in planned.tasks.levels)
    return length if runs_again and length <= TUNING.max_segments and _keep_residuals(program, length) else 0


def finds_what_it_made(program: Program, roles: Roles) -> bool:
    """Whether the program as written keeps most residuals of its layers, so that recomputation could save memory."""
    length = layer_count(program.jaxpr, roles.may_hold_layers, roles.aliases)
    return _keep_residuals(program, length) if length else not any(map(is_recomputed, program.jaxpr.eqns))


def _keep_residuals(program: Program, length: int) -> bool:
    """Whether scans over so many layers stack more bytes of residuals than they carry.

    If `jax.checkpoint` recomputes whole layers, only their inputs are kept, and recomputation can save nothing more.
    """
    kept = carried = 0
    for eqn in program.jaxpr.eqns:
        if kind_of(eqn) == "scan" and trip_count(eqn) == length and not is_backward(eqn):
            region = region_of(eqn)
            made = {var for body in region.bodies for inner in body.eqns for var in inner.outvars}
            kept += sum(num_bytes(b.value) for b in region.bindings if b.role == "ys" and b.value in made)
            carried += sum(num_bytes(b.value) for b in region.bindings if b.role == "carry")
    return kept > carried


def _finer(length: int, count: int) -> list[int]:
    """Numbers of parts, from `count` on, that split each of `count` parts into equally many pieces."""
    multiples = range(2 * count, min(length, TUNING.most_parts) + 1, count)
    if length % count == 0:
        return [count, *(n for n in multiples if length % n == 0)]
    return [count, *multiples, *([length] if length <= TUNING.most_parts and length not in multiples else [])]


def _pieces(parts: int, length: int, count: int, trips: int) -> list[int]:
    """The trips of each piece of one of `count` parts with `trips` trips, if there were `parts` parts in all."""
    pieces = trips if parts == length else parts // count
    return [units_of_shard(k, pieces, trips).size for k in range(pieces)]


def _largest(work: np.ndarray, pieces: dict[int, list[int]], num_stages: int) -> float:
    """The work of the largest stage, if segments were split into pieces of these sizes."""
    each = [
        amount * np.array(pieces.get(segment, [1])) / sum(pieces.get(segment, [1]))
        for segment, amount in enumerate(work)
    ]
    return least_largest(np.concatenate([[0.0], np.cumsum(np.concatenate(each))]), num_stages)
