"""The phases of a step that is cut into stages: one forward and one backward pass, or several such rounds.

In:     a flat program, its batch inputs, the number of microbatches.
Out:    the program with copies of the joint results that passes wait for, and its phases (`microbatch.py`).
Method: joint results for which backward passes wait are computed between the forward and the backward passes (`joins.py`).
        Where a forward pass reads parameters that gradients have moved (sharpness-aware minimization, the second of two
        optimizers), a round ends with these gradients, and the move stands between two rounds. With a single microbatch,
        its sums are those of the batch. Where much work would be done at once on samples that the step draws for itself
        (the noise of a generator), these are read in microbatches like the batch (`drawn.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from autopar._jax import Jaxpr, JaxprEqn, Var
from autopar.errors import MicrobatchError
from autopar.ir.dataflow import inputs_of, makers, read_by
from autopar.ir.gradient import (
    after_gradients,
    feeds_backward,
    is_ahead,
    is_backward,
    is_of_inner_gradient,
    is_recomputed,
    made_by_backward,
)
from autopar.ir.region import kind_of
from autopar.ir.split.microbatches.drawn import drawn_at_once, drawn_samples
from autopar.ir.split.microbatches.microbatch import Microbatches, check_divides, write_phases
from autopar.ir.split.microbatches.phases import find_phases
from autopar.ir.split.microbatches.refusal import refused, too_much_at_once
from autopar.ir.split.microbatches.waiting import SamplesWaitError
from autopar.ir.split.placement import BY_EACH, Axis, Batch, Split, sample_dims
from autopar.ir.split.rounds.forward_sums import with_forward_sums
from autopar.ir.split.rounds.joins import samples_of_backward, with_joins, with_rounds
from autopar.ir.split.rounds.steps import holds_steps, is_loop_of_steps
from autopar.ir.split.solution import LoopSolution
from autopar.ir.work import Work
from autopar.tuning import TUNING

Decide = Callable[..., LoopSolution]
"""`find_phases` of a program, with its `joins`."""


def split_at_joins(
    jaxpr: Jaxpr, count: int, batch: Batch, per_microbatch: bool = False, name: str = "the batch"
) -> tuple[Jaxpr, Microbatches]:
    """Split a step into phases for stages: each stage accumulates its own terms of a gradient.

    Args:
        count: Number of microbatches, at least 2.
        batch: The inputs that hold samples.
        per_microbatch: Use local statistics where samples wait for a sum over the batch.
        name: The name of the batch in messages.

    Returns:
        The step, with a copy of each sum for which backward passes wait, and its phases.

    Raises:
        BatchError: There is no batch, or it does not divide.
        MicrobatchError: The step cannot be split exactly.
    """
    check_divides(jaxpr, count, batch, name)
    decide = partial(find_phases, count=count, batch=batch, per_microbatch=per_microbatch, apart=True)
    found = _in_passes(jaxpr, count, batch, decide)
    drawn = drawn_at_once(jaxpr, batch, [_outside(found)])
    ways = [found]
    for split in (_at_joins, _in_rounds) if drawn else ():
        with contextlib.suppress(MicrobatchError):
            ways.append(split(jaxpr, partial(decide, drawn=drawn)))
    return min(ways, key=lambda way: sum(Work().of_equations(_outside(way))))


def _outside(found: tuple[Jaxpr, Microbatches]) -> list[JaxprEqn]:
    """The equations that run on all samples at once."""
    _, split = found
    return [*split.before, *split.between, *split.after]


def _in_passes(jaxpr: Jaxpr, count: int, batch: Batch, decide: Decide) -> tuple[Jaxpr, Microbatches]:
    """Phases of one forward and one backward pass, or of several rounds where these do not do."""
    try:
        return _at_joins(jaxpr, decide)
    except MicrobatchError as refusal:
        error = refusal
        waits = refusal.__cause__  # a shuffle between two layers waits for rows of other samples
        again = _goes_again(jaxpr, batch)
        if again or (isinstance(waits, SamplesWaitError) and waits.is_for_rows):
            try:
                return _in_rounds(jaxpr, decide)
            except MicrobatchError as of_rounds:  # what a round ends with does not stand in the way
                error = of_rounds if again else refusal
        loop = next(filter(_goes_through_steps, jaxpr.eqns), None)
        raise (error if loop is None else _in_a_loop(count, loop)) from None


def _at_joins(jaxpr: Jaxpr, decide: Decide) -> tuple[Jaxpr, Microbatches]:
    """Phases of one forward and one backward pass, with joins between them where needed.

    Raises `MicrobatchError`: joins do not suffice; its cause is the first `SamplesWaitError`.
    """
    joins: list[JaxprEqn] | None = None
    first: SamplesWaitError | None = None
    while True:  # ends: each turn leaves fewer sums that are recomputed, or in a loop, or read without a join
        try:
            return jaxpr, write_phases(jaxpr, decide(jaxpr, joins=joins))
        except SamplesWaitError as waits:
            first = first or waits.with_traceback(None)
            better, more = with_forward_sums(jaxpr, waits.is_sum), list[JaxprEqn]()
            if better is jaxpr:
                better, more = with_joins(jaxpr, (*waits.incomplete, *waits.summed))
            if better is jaxpr and joins is not None:
                # Join the samples that are waited for, and those on which gradients of sums depend.
                behind = samples_of_backward(jaxpr, (*waits.sums, *waits.samples), waits.solution)
                better, more = with_joins(jaxpr, (*waits.samples, *behind))
            if better is jaxpr and joins is not None:
                of_pairs = waits.is_late_work and not first.sums
                raise (too_much_at_once(first.error, TUNING.joined_work) if of_pairs else first.error) from first
            jaxpr, joins = better, [*(joins or ()), *more]
        except MicrobatchError as error:
            raise (error if first is None else first.error) from first


def _goes_through_steps(eqn: JaxprEqn) -> bool:
    """Whether an equation holds training steps; a scan that only adds up gradients does not."""
    return is_loop_of_steps(eqn) or (holds_steps(eqn) and kind_of(eqn) != "scan")


def _in_a_loop(count: int, loop: JaxprEqn) -> MicrobatchError:
    """The error for a loop, or branches, of training steps that are too many to be written out."""
    return refused(
        count,
        loop,
        "its turns, or its branches, are training steps: each takes a gradient and goes on with what that has moved. "
        f"Stages do so up to {TUNING.stage_rounds} times, in a `lax.scan` {TUNING.written_steps} times.",
        ", or take fewer such turns in one call of the step",
    )


def _goes_again(jaxpr: Jaxpr, batch: Batch, drawn: Iterable[Var] = ()) -> bool:
    """Whether a forward pass on samples depends on gradients."""
    led, of_batch = made_by_backward(jaxpr), dict.fromkeys([*(jaxpr.invars[k] for k in batch), *drawn])
    for eqn in jaxpr.eqns:
        samples = any(a in of_batch for a in inputs_of(eqn))
        is_led = any(a in led for a in inputs_of(eqn))
        if is_of_inner_gradient(eqn):
            led.update(dict.fromkeys(eqn.outvars))
        elif is_led and not (is_backward(eqn) or is_recomputed(eqn)):
            if is_ahead(eqn) or samples:
                return True
        of_batch.update(dict.fromkeys(eqn.outvars if samples and not is_led else ()))
    return False


def _in_rounds(jaxpr: Jaxpr, decide: Decide) -> tuple[Jaxpr, Microbatches]:
    """Phases of several rounds of forward and backward passes, with the joint results of each before the next."""
    joins: list[JaxprEqn] = []
    for _ in range(TUNING.stage_rounds):
        try:
            return jaxpr, write_phases(jaxpr, decide(jaxpr, joins=joins))
        except SamplesWaitError as waits:
            error = too_much_at_once(waits.error, TUNING.joined_work) if waits.is_late_work else waits.error
            better, more = with_rounds(jaxpr, (*waits.sums, *waits.complete))
            if better is jaxpr:
                # Other readers go on with the rows of their microbatch.
                moved = [cause.operand for cause in waits.moved]
                better, more = with_rounds(jaxpr, moved, {cause.eqn for cause in waits.moved})
            if better is jaxpr:
                better, more = with_rounds(jaxpr, waits.samples)
            if better is jaxpr:
                break
            jaxpr, joins = better, [*joins, *more]
    raise error


def whole_batch(jaxpr: Jaxpr, batch: Batch) -> tuple[Jaxpr, Microbatches]:
    """The phases of a step whose only microbatch is the whole batch.

    Equations that depend on gradients and are not part of a backward pass come after the loop, or between rounds if another
    forward pass depends on them. A step without a backward pass is all loop.
    """
    drawn = drawn_samples(jaxpr, batch)
    if _goes_again(jaxpr, batch, drawn):
        with contextlib.suppress(MicrobatchError, SamplesWaitError):
            rounds = _whole_in_rounds(jaxpr, batch, drawn)
            if rounds[1].between:
                return rounds
    solution = LoopSolution(Axis(1))
    solution.placement_of.update((jaxpr.invars[k], Split(dim)) for k, dim in sample_dims(batch).items())
    for eqn, is_behind in zip(jaxpr.eqns, after_gradients(jaxpr), strict=True):
        solution.phase[eqn] = "after" if is_behind else "before"
        if not is_behind and any(a in solution.placement_of for a in inputs_of(eqn)):
            solution.phase[eqn] = "loop"
            solution.placement_of.update(dict.fromkeys(eqn.outvars, BY_EACH))
    return jaxpr, write_phases(jaxpr, solution)


def _whole_in_rounds(jaxpr: Jaxpr, batch: Batch, drawn: Mapping[Var, int]) -> tuple[Jaxpr, Microbatches]:
    """The phases of the only microbatch in several rounds; equations that move parameters stand between them."""
    decide = partial(find_phases, count=1, batch=batch, per_microbatch=True, apart=True, drawn=drawn)
    solution, maker = decide(jaxpr, joins=[]), makers(jaxpr.eqns)
    matters = zip(jaxpr.eqns, feeds_backward(jaxpr), strict=True)
    read = read_by(eqn for eqn, feeds in matters if feeds and not is_backward(eqn))
    made = [var for var in read if var in maker and is_backward(maker[var])]
    jaxpr, joins = with_rounds(jaxpr, [var for var in made if not isinstance(solution.made_as(var), Split)])
    return jaxpr, write_phases(jaxpr, decide(jaxpr, joins=joins))
