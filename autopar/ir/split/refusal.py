"""Why a step cannot be worked through in microbatches, in words.

In:     the operation that needs what all samples make together, and the one that waits for it.
Out:    `MicrobatchError`: names both, with the user's lines, and says what to do.
"""

from __future__ import annotations

from autopar._jax import JaxprEqn
from autopar.errors import MicrobatchError
from autopar.ir.region import region_of
from autopar.ir.source import source_line
from autopar.ir.split.placement import Partial, Placement, Split
from autopar.ir.split.solver import Cause


def _what(placement: Placement) -> str:
    match placement:
        case Partial("sum"):
            return "the sum of"
        case Partial():
            return "the largest or smallest of"
    return "all of"


def refusal(cause: Cause, eqn: JaxprEqn, placement: Placement, count: int, can_stand_in: bool) -> MicrobatchError:
    """The error.

    Args:
        cause: Why `eqn`, on which samples wait, cannot run.
        eqn: Which.
        placement: Of the operand that it needs.
        count: Number of microbatches.
        can_stand_in: Whether a microbatch's own value could be taken for that operand.
    """
    first = f"`{cause.eqn.primitive}` at {source_line(cause.eqn)}"
    later = f"`{eqn.primitive}` at {source_line(eqn)}"
    waits = "itself" if eqn is cause.eqn else later
    shape = tuple(cause.operand.aval.shape)
    wrong = (
        f"it needs {_what(placement)} the samples of the whole batch (operand of shape {shape}), and single samples "
        f"wait for it ({waits}), as with batch statistics or a loss over pairs of samples."
    )
    do = "use num_microbatches=1 (Auto() does)"
    if isinstance(placement, Split):
        do += (
            ", or, if each sample is by itself in what is done there (rows sorted by expert and put back), make that one "
            'function and say so above it: @autopar.sharding_rule("b d -> b d")'
        )
    match cause.eqn.primitive.name:
        case "concatenate" if isinstance(placement, Split):
            wrong = (
                f"it puts samples (operand of shape {shape}) in one dim with rows that are no whole number of batches: "
                "of these a microbatch has no part of its own."
            )
            do += ", or give what is not of the samples to the model in a call of its own"
        case "scan" if not isinstance(placement, Partial) and _goes_by_trips(cause):
            wrong = (
                f"it goes over samples trip by trip (operand of shape {shape}), and from trip to trip it carries more "
                "than sums, or its trips do not divide into microbatches."
            )
    if can_stand_in:
        do += (
            ', or say microbatch_semantics="per_microbatch": each microbatch then takes its own statistics, which is '
            "another computation than the step's"
        )
    return MicrobatchError(
        "the step cannot be worked through in microbatches exactly.",
        given=f"{count} microbatches; {first}",
        wrong=wrong,
        do=f"{do}.",
        operation=str(cause.eqn.primitive),
        source=source_line(cause.eqn),
    )


def _goes_by_trips(cause: Cause) -> bool:
    """Whether the operand of a scan is what goes from trip to trip, or what each trip has its row of."""
    return all(cause.operand is not b.outer for b in region_of(cause.eqn).consts)
