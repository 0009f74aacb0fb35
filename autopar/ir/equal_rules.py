"""The rules of many equations, of equal ones once.

In:     equations, one after the other.
Out:    `EqualRules`: their rules.
Method: by signature (`signature.py`): a step has thousands of equations and a few hundred kinds of them.
"""

from __future__ import annotations

from autopar._jax import JaxprEqn
from autopar.ir.rules import ShardingRule, rule_for
from autopar.ir.signature import equation_signature


class EqualRules:
    """Rules that have been asked for, for as long as one pass takes."""

    def __init__(self) -> None:
        self._known: dict[object, ShardingRule] = {}

    def of(self, eqn: JaxprEqn) -> ShardingRule:
        """As `rule_for`."""
        signature = equation_signature(eqn)
        rule = self._known.get(signature)
        if rule is None:
            rule = self._known[signature] = rule_for(eqn)
        return rule
