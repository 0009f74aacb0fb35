"""The shares in which values enter and leave loops and branches, when a program is worked through in pieces.

In:     a structured equation of the loop, and the share that a piece makes of each value (`shares.py`).
Out:    the share of each operand that the equation takes, and in which each result of each body leaves it.
Method: what a body makes of its own variables is known; across the border of a scan the stacked dim is one more.
"""

from __future__ import annotations

from typing import Any

from autopar._jax import JaxprEqn, Literal, Var
from autopar.ir.split.pieces import OWN, WHOLE, Cut, Share
from autopar.ir.structure import body_jaxprs, scan_parts, while_parts


def border_shares(eqn: JaxprEqn, made: dict[Var, Share]) -> list[list[Share]]:
    """The share in which each result of each body of a structured equation in the loop leaves it."""

    def share(atom: Any) -> Share:
        return WHOLE if isinstance(atom, Literal) else made.get(atom, WHOLE)

    def inner(var: Any) -> Share:
        found = made.get(var, WHOLE)
        return found.moved(-1) if isinstance(found, Cut) else found

    match eqn.primitive.name:
        case "scan":
            parts = scan_parts(eqn)
            return [[*(share(var) for _, var, _, _ in parts.carries), *(inner(result) for _, result in parts.ys)]]
        case "while":
            return [[OWN], [share(var) for _, _, var, _, _ in while_parts(eqn).carries]]
        case "cond":
            return [[share(var) for var in eqn.outvars] for _ in body_jaxprs(eqn)]
    return []


def operand_shares(eqn: JaxprEqn, made: dict[Var, Share], own_trips: Cut | None = None) -> list[Share]:
    """The share in which a structured equation in the loop takes each operand; `own_trips`: of a scan over samples."""

    def share(var: Var) -> Share:
        return made.get(var, WHOLE)

    match eqn.primitive.name:
        case "scan":
            parts = scan_parts(eqn)
            outer = [share(var) for _, var in parts.xs]
            xs = [s.moved(1) if isinstance(s, Cut) else own_trips or s for s in outer]
            return [
                *(share(var) for _, var in parts.consts),
                *(share(var) for _, var, _, _ in parts.carries),
                *xs,
            ]
        case "while":
            loop = while_parts(eqn)
            return [
                *(share(var) for _, var in loop.cond_consts),
                *(share(var) for _, var in loop.body_consts),
                *(share(var) for _, _, var, _, _ in loop.carries),
            ]
        case "cond":
            return [OWN, *(share(var) for var in body_jaxprs(eqn)[0].invars)]
    return [share(var) for var in eqn.outvars]
