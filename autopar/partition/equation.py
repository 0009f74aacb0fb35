"""Runs one equation on one device: local operands in the strategy's shardings, local results out.

In:     an equation, its rule, the chosen strategy.
Out:    its results, after the reductions of the strategy; partial sums are left partial.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from autopar._jax import JaxprEqn, bind_eqn
from autopar.intra_op.strategies import Strategy
from autopar.ir.rules.rule import Shard, ShardingRule
from autopar.partition.collectives import reduce_at_once
from autopar.partition.order import after


def run_equation(
    eqn: JaxprEqn,
    rule: ShardingRule,
    strategy: Strategy,
    axis_sizes: Mapping[str, int],
    operands: Sequence[jax.Array],
    platform: str = "",
) -> list[jax.Array]:
    """Run `eqn` under `strategy` on this device; call it inside `shard_map`."""
    shard = Shard(strategy.axes_of, axis_sizes, rule.sizes, platform=platform)
    if strategy.travels and rule.travel is not None:
        # Each product sends its own rows, as planned: the added dependence keeps XLA from merging equal sends.
        first, second, *others = operands
        sent = [
            after(*pair) if k in rule.travel.travelling else pair[0]
            for k, pair in enumerate(((first, second), (second, first)))
        ]
        operands = [*sent, *others]
    if rule.once:
        results = _run_once(eqn, rule, shard, axis_sizes, operands)
    elif rule.local is not None:
        results = list(rule.local(eqn, shard, *operands))
    else:
        results = bind_eqn(eqn, *operands)
    for kind, axes in strategy.reductions:
        results = reduce_at_once(results, kind, axes)
    return results


def _run_once(
    eqn: JaxprEqn, rule: ShardingRule, shard: Shard, axis_sizes: Mapping[str, int], operands: Sequence[jax.Array]
) -> list[jax.Array]:
    """Run a call into the host on the first device only; the others return zeros, so that the sum is right."""

    def call(*arrays: jax.Array) -> list[jax.Array]:
        return bind_eqn(eqn, *arrays) if rule.local is None else list(rule.local(eqn, shard, *arrays))

    def nothing(*_: jax.Array) -> list[jax.Array]:
        return [jnp.zeros(var.aval.shape, var.aval.dtype) for var in eqn.outvars]

    first = lax.axis_index(tuple(axis_sizes)) == 0
    return lax.cond(first, call, nothing, *operands)
