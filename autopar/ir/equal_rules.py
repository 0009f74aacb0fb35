"""Caches sharding rules, so that equal equations compute theirs once.

In:     equations, one after the other.
Out:    `EqualRules`: their rules.
Method: keyed by signature (`signature.py`): a step has thousands of equations, of a few hundred kinds.
"""

from __future__ import annotations

from autopar._jax import JaxprEqn
from autopar.ir.rules import ShardingRule, rule_for
from autopar.ir.signature import equation_signature


class EqualRules:
    """The cache, which lives as long as one pass."""

    def __init__(self) -> None:
        self._known: dict[object, ShardingRule] = {}

    def of(self, eqn: JaxprEqn) -> ShardingRule:
        """As `rule_for`."""
        signature = equation_signature(eqn)
        rule = self._known.get(signature)
        if rule is None:
            rule = self._known[signature] = rule_for(eqn)
        return rule
