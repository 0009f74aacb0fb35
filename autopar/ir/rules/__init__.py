"""Sharding rules: one per primitive, one file per family (see `registry.py`)."""

from autopar.ir.rules import (  # noqa: F401  (each registers its rules)
    attention,
    convolution,
    custom_partitioning,
    elementwise,
    indexing,
    linear_algebra,
    mark,
    movement,
    opaque,
    ordering,
    pallas,
    reductions,
    reshape,
    scatter,
    update,
    windows,
)
from autopar.ir.rules.registry import has_rule, register, rule_for
from autopar.ir.rules.rule import ShardingRule

__all__ = ["ShardingRule", "has_rule", "register", "rule_for"]
