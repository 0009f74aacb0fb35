"""Strategies for values that are split in blocks: of `concatenate([chosen, rejected])` a shard has its part of each half.

In:     an equation, its rule, the number of shards, and placements of its operands or results.
Out:    `block_strategies`: the strategies that `strategy.py` lacks: along a factor in blocks, along a factor that is not the
        first of its dim (`abc->(ab)c`), or by moving whole blocks.
Method: a dim split in n blocks is a dim (n, rest) whose second factor is split; a shard holds (n, rest / count) as one dim.
        Operations that treat all positions alike work on that as they are; those that concatenate, slice or pad by whole
        blocks do so by smaller ones; those that number positions are computed whole and then split; others have none.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax

from autopar._jax import JaxprEqn, Params, bind_eqn
from autopar.ir.rules import ShardingRule, rule_for
from autopar.ir.rules.rule import Dim, Factor, Shard
from autopar.ir.split.placement import REPLICATED, Placement, Split
from autopar.ir.split.strategy import AxisStrategy, has_program, shard_of, split_along

BLOCK = "block"
"""Stands for the factor of a strategy that moves whole blocks."""


def block_strategies(
    eqn: JaxprEqn, rule: ShardingRule, count: int, placements: Sequence[Placement | None]
) -> list[AxisStrategy]:
    """Strategies for an operation on values that are split in blocks.

    `placements`: of its operands, then of its results; None where unknown.
    """
    found: dict[AxisStrategy, None] = {}
    known = rule.splittable()
    for k, (term, placement) in enumerate(zip((*rule.operands, *rule.results), placements, strict=False)):
        place = _place(rule, term[placement.dim], placement.blocks, count) if isinstance(placement, Split) else None
        if isinstance(placement, Split) and place is not None:
            factor, blocks = place
            if factor in rule.whole:
                found.update(dict.fromkeys(_moving(eqn, k, placement, count)))
            elif blocks > 1 or factor not in known:
                found.update(dict.fromkeys(_along(eqn, rule, factor, blocks, count)))
    return list(found)


def _place(rule: ShardingRule, dim: Dim, blocks: int, count: int) -> tuple[Factor, int] | None:
    """The factor of a dim that a split in blocks divides, and its number of blocks."""
    for factor in dim:
        size = rule.sizes[factor]
        if size % (blocks * count) == 0:
            return factor, blocks
        if blocks % size:
            return None
        blocks //= size
    return None


def _along(eqn: JaxprEqn, rule: ShardingRule, factor: Factor, blocks: int, count: int) -> list[AxisStrategy]:
    """The strategy along a factor, unless the operation depends on the offset of a shard."""
    strategy = split_along(rule, factor, blocks)
    if has_program(eqn, rule, strategy, count):
        return [strategy]
    return [] if eqn.invars else [_made_whole(strategy)]


def _made_whole(strategy: AxisStrategy) -> AxisStrategy:
    """The strategy for an operation without operands, such as `iota`: compute it whole, which is cheap, and take a part."""

    def local(eqn: JaxprEqn, shard: Shard) -> list[jax.Array]:
        assert strategy.factor is not None
        number, count = shard.index(strategy.factor), shard.num_shards(strategy.factor)
        wholes = zip(bind_eqn(eqn), strategy.results, strict=True)
        return [
            shard_of(whole, placement, number, count) for whole, placement in wholes if isinstance(placement, Split)
        ]

    return dataclasses.replace(strategy, blocks=1, local=local)


# Whole blocks.


def _moving(eqn: JaxprEqn, place: int, placement: Split, count: int) -> list[AxisStrategy]:
    """The strategy that moves whole blocks, of the size of those of the operand or result number `place`."""
    dim, arrays = placement.dim, (*eqn.invars, *eqn.outvars)
    rows = arrays[place].aval.shape[dim] // placement.blocks
    move = _MOVES.get(eqn.primitive.name, lambda *_: None)(eqn.params, dim, count)
    if move is None:
        return []
    sizes = [v.aval.shape[dim] for v in arrays if v.aval.ndim]
    if not all(sizes) or any(n % rows for n in (*sizes, *move.cuts)):
        return []

    def local(eqn: JaxprEqn, shard: Shard, *operands: jax.Array) -> list[jax.Array]:
        return bind_eqn(eqn, *operands, params={**eqn.params, **move.params})

    placements = [Split(dim, v.aval.shape[dim] // rows) if v.aval.ndim else REPLICATED for v in arrays]
    return [
        AxisStrategy(BLOCK, tuple(placements[: len(eqn.invars)]), tuple(placements[len(eqn.invars) :]), local=local)
    ]


def blocks_between_cuts(eqn: JaxprEqn, dim: int) -> int:
    """In how many equal blocks a dim of the first operand would have to be split for an operation to take whole ones apart;
    1: it takes none apart."""
    size, term = eqn.invars[0].aval.shape[dim], rule_for(eqn).operands[0][dim]
    if len(term) > 1:
        return rule_for(eqn).sizes[term[0]]
    move = _MOVES[eqn.primitive.name](eqn.params, dim, 1) if eqn.primitive.name in ("slice", "split") else None
    return size // math.gcd(size, *move.cuts) if move is not None else 1


@dataclass(frozen=True, slots=True)
class _Move:
    """How an operation moves blocks: its offsets along the dim, and its parameters on a shard."""

    cuts: Sequence[int]
    params: Params


def _slice(params: Params, dim: int, count: int) -> _Move | None:
    starts, limits, strides = params["start_indices"], params["limit_indices"], params["strides"]
    if strides is not None and strides[dim] != 1:
        return None
    smaller = {"start_indices": _divided(starts, dim, count), "limit_indices": _divided(limits, dim, count)}
    return _Move((starts[dim], limits[dim]), smaller)


def _pad(params: Params, dim: int, count: int) -> _Move | None:
    low, high, interior = config = params["padding_config"][dim]
    if interior:
        return None
    smaller = [tuple(n // count for n in config) if d == dim else c for d, c in enumerate(params["padding_config"])]
    return _Move((low, high), {"padding_config": tuple(smaller)})


def _divided(sizes: Sequence[int], dim: int, count: int) -> tuple[int, ...]:
    return tuple(n // count if d == dim else n for d, n in enumerate(sizes))


_MOVES: dict[str, Callable[[Params, int, int], _Move | None]] = {
    "concatenate": lambda params, dim, count: _Move((), {}),
    "pad": _pad,
    "slice": _slice,
    "split": lambda params, dim, count: _Move(params["sizes"], {"sizes": tuple(n // count for n in params["sizes"])}),
}
