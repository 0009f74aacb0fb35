"""The error for a step that cannot be split into microbatches.

In:     the operation that needs the whole batch, and the one that waits for it.
Out:    `MicrobatchError`: names both, with the user's lines, and says what to do.
"""

from __future__ import annotations

from autopar._jax import Atom, Jaxpr, JaxprEqn, Var
from autopar.errors import MicrobatchError
from autopar.ir.dataflow import ancestors, inputs_of
from autopar.ir.region import bodies_of, equations_within, is_region, kind_of, region_of
from autopar.ir.source import source_line
from autopar.ir.split.placement import Partial, Placement, Split
from autopar.ir.split.solution import LoopSolution
from autopar.ir.split.solver import Cause


def _what(placement: Placement) -> str:
    match placement:
        case Partial("sum"):
            return "the sum of"
        case Partial():
            return "the largest or smallest of"
    return "all of"


def refusal(jaxpr: Jaxpr, solution: LoopSolution, cause: Cause, eqn: JaxprEqn, can_stand_in: bool) -> MicrobatchError:
    """The error for an operation that needs the whole batch.

    `cause`: why `eqn`, for which samples wait, cannot run.
    `can_stand_in`: whether a microbatch's own value could be used for the operand that is needed.
    """
    wrong, advice = _reason(jaxpr, solution, cause, eqn)
    if can_stand_in:
        advice += (
            ', or say microbatch_semantics="per_microbatch": each microbatch then takes its own statistics, which is '
            "another computation than the step's"
        )
    return refused(solution.count, _loop_that_ends(cause, eqn) or cause.eqn, wrong, advice)


def refused(count: int, eqn: JaxprEqn, wrong: str, advice: str) -> MicrobatchError:
    """The error for an operation that microbatches cannot do; `advice`: what else to do, if anything."""
    return MicrobatchError(
        "the step cannot be worked through in microbatches exactly.",
        given=f"{count} microbatches; {_named(eqn)}",
        wrong=wrong,
        do=f"use num_microbatches=1 (Auto() does){advice}.",
        operation=str(eqn.primitive),
        source=source_line(eqn),
    )


def _reason(jaxpr: Jaxpr, solution: LoopSolution, cause: Cause, eqn: JaxprEqn) -> tuple[str, str]:
    """What is wrong, and what to do other than use no microbatches; arguments as of `refusal`."""
    placement, shape = solution.of(cause.operand), tuple(cause.operand.aval.shape)
    needed = _needed(jaxpr, solution, cause)
    if _loop_that_ends(cause, eqn) is not None:
        return (
            f"how long it goes on depends on all samples of the whole batch ({needed}): with those of a microbatch alone, it "
            "may end at another turn."
        ), (
            ", or let each sample end by itself (jax.vmap of a loop over one sample), or after a fixed number of turns "
            "(lax.scan)"
        )
    advice = ""
    if isinstance(placement, Split):
        advice = (
            ", or, if each sample is by itself in what is done there (rows sorted by expert and put back), make that one "
            'function and say so above it: @autopar.sharding_rule("b d -> b d")'
        )
    match cause.eqn.primitive.name:
        case "concatenate" if isinstance(placement, Split):
            return (
                f"it puts samples (operand of shape {shape}) in one dim with rows that are no whole number of batches: "
                "of these a microbatch has no part of its own."
            ), f"{advice}, or give what is not of the samples to the model in a call of its own"
        case "slice" | "split" if isinstance(placement, Split):
            return (
                f"it cuts samples (operand of shape {shape}) into parts that do not divide into microbatches: of these a "
                "microbatch has no part of its own."
            ), (
                ", or cut them where each part divides by the number of microbatches (jax.lax.map: with a batch_size that "
                f"divides the batch){advice}"
            )
        case "scan" if not isinstance(placement, Partial) and _goes_by_trips(cause):
            return (
                f"it goes over samples trip by trip (operand of shape {shape}), and from trip to trip it carries more "
                "than sums, or its trips do not divide into microbatches."
            ), (
                f"{advice}, or, if it goes over time and the samples are another dim than the first of the batch's arrays, "
                "pass them with samples first, and swap the dims inside the step; or, where each trip is a training step "
                "that carries what it trains, call a step of one trip once for each"
            )
    waits = "itself" if eqn is cause.eqn else _named(eqn)
    return (
        f"it needs {_what(placement)} the samples of the whole batch ({needed}), and single samples "
        f"wait for it ({waits}), as with batch statistics or a loss over pairs of samples."
    ), advice


def _needed(jaxpr: Jaxpr, solution: LoopSolution, cause: Cause) -> str:
    """Names the operand that is needed: by the operation that sums it, if that is another one, else by its shape."""
    summing = _summing(jaxpr, solution, cause.operand) if isinstance(solution.of(cause.operand), Partial) else None
    if summing is not None and summing is not cause.eqn:
        return f"which {_named(summing)} makes"
    return f"operand of shape {tuple(cause.operand.aval.shape)}"


def no_telling(count: int, eqn: JaxprEqn, value: Var) -> MicrobatchError:
    """The error for a sum of gradients, read by `eqn`, that may be of local statistics or of a loss over pairs of samples."""
    return refused(
        count,
        eqn,
        f"the loss is over pairs of all samples, each microbatch has its own batch statistics, and both are of shape "
        f"{tuple(value.aval.shape)}: which gradient this sum is of cannot be told.",
        ", or a batch whose size is not the number of statistics",
    )


def too_much_at_once(error: MicrobatchError, limit: float) -> MicrobatchError:
    """The error where the operation could run on all samples at once, but takes more than `limit` of the step's work."""
    return MicrobatchError(
        error.summary,
        given=error.given,
        wrong=f"{error.wrong} To do that of all samples at once, while the stages wait, is more than {limit:.0%} of the work.",
        do=error.do
        if error.facts["operation"] == "while"
        else error.do.removesuffix(".")
        + ", or, of a loss over pairs of samples, a smaller batch: what is done for all pairs grows with its square.",
        **error.facts,
    )


def _named(eqn: JaxprEqn) -> str:
    return f"`{eqn.primitive}` at {source_line(eqn)}"


def _summing(jaxpr: Jaxpr, solution: LoopSolution, value: Var) -> JaxprEqn | None:
    """The equation, in whichever body, that sums over samples and on whose result a value depends."""
    maker: dict[Var, JaxprEqn] = {}
    beyond: dict[Var, Atom | None] = {}  # for values at the boundary of a region: the value on its other side
    for eqn, _ in equations_within(jaxpr):
        maker.update(dict.fromkeys(eqn.outvars, eqn))
        for b in region_of(eqn).bindings if is_region(eqn) else ():
            beyond.update(dict.fromkeys(b.variables, b.operand))
            if b.result is not None:
                beyond[b.result] = b.values[-1] if b.values else b.operand

    def made_of(var: Var) -> list[Var]:
        if var in beyond:
            return [a for a in (beyond[var],) if isinstance(a, Var)]
        return [a for a in inputs_of(maker[var]) if isinstance(solution.of(a), Partial)] if var in maker else []

    behind = [var for var in ancestors([value], made_of) if var in maker and var not in beyond]
    return next((maker[var] for var in behind if not made_of(var)), None)


def _loop_that_ends(cause: Cause, eqn: JaxprEqn) -> JaxprEqn | None:
    """The loop in (or as) `eqn` whose condition reads all samples, so that they wait for each other; None: there is none."""
    for found in (eqn, *(inner for body in bodies_of(eqn) for inner, _ in equations_within(body))):
        if kind_of(found) == "while":
            loop = region_of(found)
            at_ends = (a for b in loop.bindings for a in b.values)
            tested = (inner for inner, _ in equations_within(loop.bodies[0]))
            if any(a is cause.operand for a in at_ends) or any(inner is cause.eqn for inner in tested):
                return found
    return None


def _goes_by_trips(cause: Cause) -> bool:
    """Whether the operand of a scan is a carry or a stack of rows, and no constant."""
    return all(cause.operand is not b.operand for b in region_of(cause.eqn).consts)
