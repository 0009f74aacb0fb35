"""Splits the batch of each training step in a loop, or in a branch, into microbatches of its own.

In:     a flat program, its batch inputs, the number of microbatches.
Out:    the program in which each turn of a loop that takes gradients, or tries how far to go along them, and each branch
        that takes gradients, has a loop over microbatches (`rounds.py`); and these loops, which the step around them runs on
        all samples.
Method: critics trained several times before the generator, epochs over minibatches, descent until convergence, line searches:
        no microbatch can go from turn to turn alone, for the next turn needs the gradient, or the loss, of all. The batch
        of a turn is not known; every group of its inputs that depend on the step's batch and hold equally many samples is
        tried. The phases prove it (`phases.py`): they are exact for any rows.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import TypeAlias

from autopar._jax import Jaxpr, JaxprEqn, Var, make_jaxpr
from autopar.errors import MicrobatchError
from autopar.ir.dataflow import descendants, inputs_of
from autopar.ir.gradient import is_backward, made_by_backward, takes_gradients
from autopar.ir.region import Region, kind_of, region_of
from autopar.ir.split.microbatches.refusal import refused
from autopar.ir.split.placement import Batch
from autopar.ir.split.rounds.steps import dims_of_samples, holds_steps
from autopar.ir.work import num_bytes

SplitTurn: TypeAlias = Callable[[Jaxpr, Batch], Jaxpr]
"""`accumulate_in_rounds` of a program and its batch inputs, with its other arguments bound."""


def split_turns(jaxpr: Jaxpr, count: int, batch: Batch, split: SplitTurn) -> tuple[Jaxpr, list[JaxprEqn]]:
    """The program whose loops of training steps have microbatches in each turn, and these loops; itself, if it has none.

    Raises `MicrobatchError`: a turn cannot be split into microbatches.
    """
    of_batch = descendants(jaxpr.eqns, given=(jaxpr.invars[k] for k in batch))
    led = made_by_backward(jaxpr)
    not_led = dict.fromkeys(var for var in of_batch if var not in led)
    eqns: list[JaxprEqn] = []
    loops: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        given = of_batch if holds_steps(eqn) else not_led if _tries_gradients(eqn, led) else {}
        if any(a in given for a in inputs_of(eqn)):
            eqn = _in_microbatches(eqn, given, count, split)
            loops.append(eqn)
        eqns.append(eqn)
    return (make_jaxpr(jaxpr.invars, jaxpr.outvars, eqns), loops) if loops else (jaxpr, [])


def _tries_gradients(eqn: JaxprEqn, led: Container[Var]) -> bool:
    """Whether an equation is a loop whose turns only judge, by the loss, a step that gradients have led to: backtracking."""
    return kind_of(eqn) == "while" and not is_backward(eqn) and any(a in led for a in inputs_of(eqn))


def _in_microbatches(eqn: JaxprEqn, of_batch: dict[Var, None], count: int, split: SplitTurn) -> JaxprEqn:
    region = region_of(eqn)
    bodies = list(region.bodies)
    for k, body in enumerate(bodies):
        reads_batch = any(True for _ in _batches(region, k, of_batch, count))
        if takes_gradients(body) or (reads_batch and not holds_steps(eqn)):
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


def _batches(region: Region, number: int, of_batch: dict[Var, None], count: int) -> Iterator[dict[int, int]]:
    """Groups of a body's inputs that depend on the step's batch and hold equally many samples; those of most bytes first.

    A group: input -> its dim that runs over samples.
    """
    body = region.bodies[number]
    position = {var: k for k, var in enumerate(body.invars)}
    bound = [b for b in region.of_role("const", "xs") if isinstance(b.operand, Var) and b.operand in of_batch]
    given = [var for b in bound if (var := b.inputs[number]) is not None]
    by_size: dict[int, dict[Var, int]] = {}
    for var, dims in dims_of_samples(body, given).items():
        if dims and var.aval.shape[min(dims)] % count == 0:
            by_size.setdefault(var.aval.shape[min(dims)], {})[var] = min(dims)
    for group in sorted(by_size.values(), key=lambda group: -sum(map(num_bytes, group))):
        yield {position[var]: dim for var, dim in group.items()}
