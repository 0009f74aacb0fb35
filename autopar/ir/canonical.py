"""When two programs are the same but for the names of their variables.

In:     a flat program.
Out:    `canonical_key(jaxpr)`: hashable, equal for programs with the same equations between the same places.
Method: variables are numbered in order of appearance; bodies of loops and branches likewise. Source lines do not count,
        whether an equation is of the backward pass does, for plans treat it differently.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from autopar._jax import Jaxpr, JaxprEqn, Literal, Var
from autopar.ir.signature import equation_signature
from autopar.ir.source import is_backward
from autopar.ir.structure import body_jaxprs, is_structured, trip_count


def canonical_key(jaxpr: Jaxpr) -> Hashable:
    """A key that is equal for equal programs."""
    return _key(jaxpr, {})


def _key(jaxpr: Jaxpr, number: dict[Var, int]) -> Hashable:
    def name(atom: Any) -> Hashable:
        if isinstance(atom, Literal):
            return "literal", str(atom.val), str(atom.aval)
        return number.setdefault(atom, len(number))

    inputs = tuple((name(var), tuple(var.aval.shape), str(var.aval.dtype)) for var in jaxpr.invars)
    eqns = tuple(
        (_what(eqn, number), tuple(map(name, eqn.invars)), tuple(map(name, eqn.outvars)), is_backward(eqn))
        for eqn in jaxpr.eqns
    )
    return inputs, eqns, tuple(map(name, jaxpr.outvars))


def _what(eqn: JaxprEqn, number: dict[Var, int]) -> Hashable:
    if not is_structured(eqn):
        return equation_signature(eqn)
    trips = trip_count(eqn) if eqn.primitive.name == "scan" else 0
    reverse = eqn.params.get("reverse", False)
    return eqn.primitive.name, trips, reverse, tuple(_key(body, number) for body in body_jaxprs(eqn))
