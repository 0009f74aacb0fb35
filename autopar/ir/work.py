"""How much work an equation is: for balancing and for deciding what is cheap.

In:     equations of a flat program.
Out:    operations, or elements made where those are more; loops count every trip; bytes of values.
Method: FLOPs of the sharding rules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar._jax import Atom, JaxprEqn, on_host
from autopar.ir.region import bodies_of, is_region, trip_count
from autopar.ir.rules import rule_for
from autopar.ir.signature import equation_signature


class Work:
    """The work of equations; equal ones are looked up once."""

    def __init__(self) -> None:
        self._known: dict[object, float] = {}

    def of(self, eqn: JaxprEqn) -> float:
        """Operations of an equation, or elements that it makes, whichever is more."""
        if is_region(eqn):
            return trip_count(eqn) * sum(sum(self.of_equations(body.eqns)) for body in bodies_of(eqn))
        signature = equation_signature(eqn)
        if signature not in self._known:
            self._known[signature] = max(rule_for(eqn).flops, float(sum(map(num_elements_of, eqn.outvars))))
        return self._known[signature]

    def of_equations(self, eqns: Sequence[JaxprEqn]) -> list[float]:
        """The work of each."""
        return [self.of(eqn) for eqn in eqns]


def num_elements_of(var: Atom) -> int:
    """Elements of a value."""
    return math.prod(getattr(var.aval, "shape", ()))


def num_bytes(var: Atom) -> int:
    """Bytes of a value."""
    return num_elements_of(var) * var.aval.dtype.itemsize


def device_bytes(var: Atom) -> int:
    """Bytes of a value, whole, if it is in devices' memory."""
    return 0 if on_host(var.aval) else num_bytes(var)
