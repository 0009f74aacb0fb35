"""One equation on one device: local operands in the strategy's shardings, local results out.

In:     an equation, its rule, the chosen strategy.
Out:    its results, reduced where the strategy says so at once; partial sums are left partial.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax

from autopar._jax import JaxprEqn
from autopar.intra_op.strategies import Strategy
from autopar.ir.rules.rule import Shard, ShardingRule
from autopar.partition.collectives import reduce_at_once


def run_equation(
    eqn: JaxprEqn, rule: ShardingRule, strategy: Strategy, axis_sizes: Mapping[str, int], operands: Sequence[jax.Array]
) -> list[jax.Array]:
    """The per-device program of `eqn` under `strategy`; call it inside `shard_map`."""
    shard = Shard(strategy.axes_of, axis_sizes, rule.sizes)
    if rule.local is not None:
        results = list(rule.local(eqn, shard, *operands))
    else:
        bound = eqn.primitive.bind(*operands, **eqn.params)
        results = list(bound) if eqn.primitive.multiple_results else [bound]
    for kind, axes in strategy.reductions:
        results = reduce_at_once(results, kind, axes)
    return results
