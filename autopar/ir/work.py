"""Caches sharding rules; counts the work of equations and the bytes of values, for balancing and deciding what is cheap.

In:     equations of a flat program.
Out:    `EqualRules`; the larger of operations and elements of results, over all trips of loops; bytes of values.
Method: work is the FLOPs of the sharding rules, which are keyed by signature (`signature.py`): a step has thousands of
        equations, of a few hundred kinds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar._jax import Atom, JaxprEqn, on_host
from autopar.ir.region import bodies_of, is_region, trip_count
from autopar.ir.rules import ShardingRule, rule_for
from autopar.ir.signature import equation_signature


class EqualRules:
    """Sharding rules, computed once for equal equations, for as long as one pass takes."""

    def __init__(self) -> None:
        self._known: dict[object, ShardingRule] = {}

    def of(self, eqn: JaxprEqn) -> ShardingRule:
        """As `rule_for`."""
        signature = equation_signature(eqn)
        rule = self._known.get(signature)
        if rule is None:
            rule = self._known[signature] = rule_for(eqn)
        return rule


class Work:
    """The work of equations, whose rules are computed once for equal ones."""

    def __init__(self) -> None:
        self._rules = EqualRules()

    def of(self, eqn: JaxprEqn) -> float:
        """The larger of an equation's operations and the elements of its results."""
        if is_region(eqn):
            return trip_count(eqn) * sum(sum(self.of_equations(body.eqns)) for body in bodies_of(eqn))
        return max(self._rules.of(eqn).flops, float(sum(map(num_elements_of, eqn.outvars))))

    def of_equations(self, eqns: Sequence[JaxprEqn]) -> list[float]:
        """The work of each equation."""
        return [self.of(eqn) for eqn in eqns]


def num_elements_of(var: Atom) -> int:
    """Elements of a value."""
    return math.prod(getattr(var.aval, "shape", ()))


def num_bytes(var: Atom) -> int:
    """Bytes of a value."""
    return num_elements_of(var) * var.aval.dtype.itemsize


def device_bytes(var: Atom) -> int:
    """Bytes of the whole, unsharded value in device memory; 0 if it is in the host's."""
    return 0 if on_host(var.aval) else num_bytes(var)
