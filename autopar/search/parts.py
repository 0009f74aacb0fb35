"""Into how many parts scans over layers are taken, so that stages are even, and fit.

In:     a step that is cut with as many parts as stages; a pipeline of it.
Out:    the number of parts with which the largest stage is nearly as small as it can be; whether layers should stand by
        themselves.
Method: stages begin between parts. With one part for each, what comes before and behind the layers (a large head) is on
        top of the first's and the last's share; with finer parts these get fewer layers. Each part is a loop of its own
        to compile, so the fewest do that serve. A loop is recomputed only whole: where memory demands that something does,
        layers without loops have the choice of which, and of what in them.
"""

from __future__ import annotations

import numpy as np

from autopar.inter_op.chain import least_largest
from autopar.inter_op.cut import CutStep
from autopar.inter_op.residuals import CHEAP
from autopar.ir.gradient import is_backward, is_recomputed
from autopar.ir.program import Program
from autopar.ir.region import kind_of, region_of, trip_count
from autopar.ir.split.layers.layers import layer_count
from autopar.ir.split.placement import share_of
from autopar.ir.trace.state import Roles
from autopar.ir.work import num_bytes
from autopar.streams.assemble import PipelinePlan
from autopar.tuning import TUNING


def even_parts(cut: CutStep, num_stages: int) -> int:
    """How many parts serve for so many stages; those that the step is cut into, if it is even or nothing would help."""
    count, length, chain = cut.stacks.count, cut.stacks.length, cut.chain
    sizes = [share_of(k, count, length).size for k in range(count)]
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
    """As many parts as layers, if these are in loops that memory demands to recompute, and that keep what might; else 0.

    `planned` is a pipeline of the step; None: none fits.
    """
    length = layer_count(program.jaxpr, roles.may_hold_layers, roles.aliases)
    runs_again = planned is None or any(level > CHEAP for level in planned.tasks.levels)
    return length if runs_again and length <= TUNING.max_segments and _keep_what_they_make(program, length) else 0


def finds_what_it_made(program: Program, roles: Roles) -> bool:
    """Whether the backward pass finds most of what layers made, which might be recomputed; as the program is written."""
    length = layer_count(program.jaxpr, roles.may_hold_layers, roles.aliases)
    return _keep_what_they_make(program, length) if length else not any(map(is_recomputed, program.jaxpr.eqns))


def _keep_what_they_make(program: Program, length: int) -> bool:
    """Whether scans over so many layers keep more of what a layer makes than what goes on to the next.

    Where `jax.checkpoint` has all of a layer recomputed, its input is kept, and there is nothing left that might.
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
    """The numbers of parts, from `count` on, that cut each of `count` parts into as many pieces, as even as can be."""
    multiples = range(2 * count, min(length, TUNING.most_parts) + 1, count)
    if length % count == 0:
        return [count, *(n for n in multiples if length % n == 0)]
    return [count, *multiples, *([length] if length <= TUNING.most_parts and length not in multiples else [])]


def _pieces(parts: int, length: int, count: int, trips: int) -> list[int]:
    """The trips of each piece of one of `count` parts, if all were cut so that there are `parts`."""
    pieces = trips if parts == length else parts // count
    return [share_of(k, pieces, trips).size for k in range(pieces)]


def _largest(work: np.ndarray, pieces: dict[int, list[int]], num_stages: int) -> float:
    """The work of the largest stage, if these segments were in pieces of such sizes."""
    each = [
        amount * np.array(pieces.get(segment, [1])) / sum(pieces.get(segment, [1]))
        for segment, amount in enumerate(work)
    ]
    return least_largest(np.concatenate([[0.0], np.cumsum(np.concatenate(each))]), num_stages)
