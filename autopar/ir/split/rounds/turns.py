"""Loops whose turns are training steps of their own, and branches that are: each works through its batch in microbatches.

In:     a flat program, its batch inputs, the number of microbatches.
Out:    the program, whose loops that take gradients and go on with what these have moved have a loop over microbatches in
        each turn (`rounds.py`), and so have branches; and these loops, which the step around them runs on all samples.
Method: critics that are trained several times before the generator, epochs over minibatches, descent until it is good enough,
        a line search that asks for the gradient at each point: no microbatch can go from turn to turn by itself, for the next
        one waits for the sum of all. Of what is made of the batch, a turn reads stacks of rows or all of it; whatever of that
        has as many rows is tried as its batch. That it is one is shown by the phases (`phases.py`), which are exact for rows
        of anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from autopar._jax import Jaxpr, JaxprEqn, Var, make_jaxpr
from autopar.errors import MicrobatchError
from autopar.ir.dataflow import descendants, inputs_of
from autopar.ir.gradient import is_backward
from autopar.ir.region import Region, equations_within, kind_of, region_of
from autopar.ir.split.microbatches.refusal import refused
from autopar.ir.work import num_bytes

SplitTurn: TypeAlias = Callable[[Jaxpr, Sequence[int]], Jaxpr]
"""A program in microbatches, given which of its inputs are the batch; it raises as `accumulate_in_rounds` does."""


def split_turns(jaxpr: Jaxpr, count: int, batch: Sequence[int], split: SplitTurn) -> tuple[Jaxpr, list[JaxprEqn]]:
    """The program with each turn of its loops of steps in microbatches, and these loops; none: itself.

    Raises:
        MicrobatchError: A turn cannot be worked through in microbatches.
    """
    of_batch = descendants(jaxpr.eqns, given=(jaxpr.invars[k] for k in batch))
    eqns: list[JaxprEqn] = []
    loops: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if any(a in of_batch for a in inputs_of(eqn)) and holds_steps(eqn):
            eqn = _in_microbatches(eqn, of_batch, count, split)
            loops.append(eqn)
        eqns.append(eqn)
    return (make_jaxpr(jaxpr.invars, jaxpr.outvars, eqns), loops) if loops else (jaxpr, [])


def holds_steps(eqn: JaxprEqn) -> bool:
    """Whether an equation is a loop that takes gradients in its turns, or a condition that does so in a branch, and is not of a
    gradient itself."""
    if kind_of(eqn) not in ("scan", "while", "cond") or is_backward(eqn):
        return False
    return any(map(_takes_gradients, region_of(eqn).bodies))


def _takes_gradients(body: Jaxpr) -> bool:
    return any(is_backward(inner) for inner, _ in equations_within(body))


def _in_microbatches(eqn: JaxprEqn, of_batch: dict[Var, None], count: int, split: SplitTurn) -> JaxprEqn:
    region = region_of(eqn)
    bodies = list(region.bodies)
    for k, body in enumerate(bodies):
        if _takes_gradients(body):
            bodies[k] = _split_body(region, k, of_batch, count, split)
    return region.with_bodies(bodies)


def _split_body(region: Region, number: int, of_batch: dict[Var, None], count: int, split: SplitTurn) -> Jaxpr:
    eqn, first = region.eqn, None
    for rows in _batches(region, number, of_batch, count):
        try:
            return split(region.bodies[number], rows)
        except MicrobatchError as error:
            first = first or error
    if first is None:
        first = refused(
            count,
            eqn,
            "each of its turns takes a gradient and goes on with what that has moved, and nothing that a turn reads of "
            f"the batch has rows that divide into {count} microbatches.",
            ", or minibatches of a multiple of them",
        )
    raise first


def _batches(region: Region, number: int, of_batch: dict[Var, None], count: int) -> Iterator[list[int]]:
    """Inputs of a body that have as many rows, and are made of the step's batch; those of most bytes first."""
    position = {var: k for k, var in enumerate(region.bodies[number].invars)}
    by_size: dict[int, list[Var]] = {}
    for b in region.of_role("const", "xs"):
        var = b.inner[number] if isinstance(b.outer, Var) and b.outer in of_batch else None
        if var is not None and var.aval.shape and var.aval.shape[0] % count == 0:
            by_size.setdefault(var.aval.shape[0], []).append(var)
    for group in sorted(by_size.values(), key=lambda group: -sum(map(num_bytes, group))):
        yield [position[var] for var in group]
