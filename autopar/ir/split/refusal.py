"""Why a step cannot be worked through in microbatches, in words.

In:     the operation that needs what all samples make together, and the one that waits for it.
Out:    `MicrobatchError`: names both, with the user's lines, and says what to do.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar._jax import JaxprEqn, Var
from autopar.errors import MicrobatchError
from autopar.ir.source import source_line
from autopar.ir.split.pieces import Cut, Extreme, Share, Sum, Whole
from autopar.ir.structure import scan_parts


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a value is there only after the loop: `eqn` needs `operand` of all samples."""

    eqn: JaxprEqn
    operand: Var


_JOINED = {Sum: "the sum of", Extreme: "the largest or smallest of", Cut: "all of"}


def refusal(cause: Cause, eqn: JaxprEqn, share: Share, count: int, can_stand_in: bool) -> MicrobatchError:
    """The error.

    Args:
        cause: Why `eqn`, on which samples wait, cannot run.
        eqn: Which.
        share: Of the operand that it needs.
        count: Number of microbatches.
        can_stand_in: Whether a microbatch's own value could be taken for that operand.
    """
    first = f"`{cause.eqn.primitive}` at {source_line(cause.eqn)}"
    later = f"`{eqn.primitive}` at {source_line(eqn)}"
    waits = "itself" if eqn is cause.eqn else later
    shape = tuple(cause.operand.aval.shape)
    what = _JOINED.get(type(share), "all of")
    wrong = (
        f"it needs {what} the samples of the whole batch (operand of shape {shape}), and single samples wait for it "
        f"({waits}), as with batch statistics or a loss over pairs of samples."
    )
    do = "use num_microbatches=1 (Auto() does)"
    match cause.eqn.primitive.name:
        case "concatenate" if isinstance(share, Cut):
            wrong = (
                f"it puts samples (operand of shape {shape}) in one dim with rows that are no whole number of batches: "
                "of these a microbatch has no part of its own."
            )
            do += ", or give what is not of the samples to the model in a call of its own"
        case "scan" if isinstance(share, Cut | Whole) and _goes_by_trips(cause):
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
    parts = scan_parts(cause.eqn)
    return all(cause.operand is not outer for outer, _ in parts.consts)
