"""The transfer function: how one operation can be done on one axis, and what a shard then computes.

In:     an equation's rule and the number of shards; the axis may be one of a mesh, the microbatches, or parts of a scan.
Out:    `strategies(rule, count)`: one for each factor that can be split and for each linear group, with the placement that
        each operand needs and each result gets; `shard_program`: what shard k computes, as a flat program.
Method: the rule's local program on local operands; the number of the shard is an input of it, where a device would ask
        for its position on the mesh.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from autopar._jax import Jaxpr, JaxprEqn, bind_eqn
from autopar.ir.build import flat_function
from autopar.ir.dims import apart, together
from autopar.ir.rules import ShardingRule
from autopar.ir.rules.rule import Factor, LocalProgram, Shard, Term
from autopar.ir.split.placement import REPLICATED, SUM, Partial, Placement, Reduction, Replicated, Split, local_aval

AXIS = "axis"


@dataclass(frozen=True, slots=True)
class AxisStrategy:
    """One way to do an operation on an axis.

    Attributes:
        factor: The factor that is split; None: the operation is linear, and is applied to partial sums.
        operands: The placement that each operand must have.
        results: The placement of each result.
        group: Which of the rule's linear groups is partial, where no factor is split.
        is_one_hot: Its partial sums hold each element once: the shard that finds it has it, the others have zeros.
        blocks: Number of blocks of the factor, of each of which a shard has its part.
        local: The program of a shard, where it is not the rule's.
        beside: A second factor that is split on the same axis; rows move between devices (`RowExchange`).
    """

    factor: Factor | None
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    group: int = 0
    is_one_hot: bool = False
    blocks: int = 1
    local: LocalProgram | None = field(default=None, compare=False)
    beside: Factor | None = None


def strategies(rule: ShardingRule, count: int) -> list[AxisStrategy]:
    """All strategies of an operation on an axis of `count` shards, those that split a factor first."""
    found = [split_along(rule, factor) for factor in rule.splittable() if rule.sizes[factor] % count == 0]
    for number, group in enumerate(rule.linear):  # partial sums pass through these operands
        operands = tuple(SUM if k in group else REPLICATED for k in range(len(rule.operands)))
        found.append(AxisStrategy(None, operands, (SUM,) * len(rule.results), number))
    return found


def split_along(rule: ShardingRule, factor: Factor, blocks: int = 1) -> AxisStrategy:
    """The strategy that splits a factor, or each of its `blocks` equal blocks."""

    def placement(term: Term, absent: Placement) -> Placement:
        for d, dim in enumerate(term):
            if factor in dim:
                return Split(d, blocks * math.prod(rule.sizes[f] for f in dim[: dim.index(factor)]))
        return absent

    sums = rule.accumulators.get(factor, ())
    operands = tuple(SUM if k in sums else placement(term, REPLICATED) for k, term in enumerate(rule.operands))
    lost: Placement = SUM if factor in rule.summed else REPLICATED
    if factor in rule.reduced:
        lost = Partial(cast(Reduction, rule.reduced[factor]))
    results = tuple(placement(term, lost) for term in rule.results)
    return AxisStrategy(factor, operands, results, is_one_hot=factor in rule.one_hot, blocks=blocks)


def exchanges(rule: ShardingRule, count: int) -> list[AxisStrategy]:
    """The strategy that sends rows between `count` devices, if the operation has one; only a mesh axis can do that."""
    exchange = rule.exchange
    if exchange is None or any(rule.sizes.get(factor, 1) % count for factor in (exchange.part, exchange.group)):
        return []
    placements = tuple(
        REPLICATED if factor is None else split_along(replace(rule, operands=(term,), results=()), factor).operands[0]
        for term, factor in zip((*rule.operands, *rule.results), exchange.along, strict=True)
    )
    operands = len(rule.operands)
    return [AxisStrategy(exchange.part, placements[:operands], placements[operands:], beside=exchange.group)]


class NoPositionError(Exception):
    """A local program asked for the offset of its shard, which has a part of each of several blocks; or for the number of
    shards, which are not equal."""


@dataclass(frozen=True, slots=True)
class _Place(Shard):
    """The position of a shard along the factor that is split, in equal units; stands for a device's position on a mesh.

    Attributes:
        first: Its first unit; where shards are single units, its number.
        size: Its number of units.
        units: Number of units of all shards.
        blocks: Number of blocks of the factor, of each of which it has a part.
    """

    first: jax.Array | int = 0
    size: int = 1
    units: int = 1
    blocks: int = 1

    def num_shards(self, factor: Factor) -> int:
        """Number of shards of a factor; 1 if it is not split. Raises `NoPositionError`: shards are not equal."""
        if not self.axes_of.get(factor):
            return 1
        if self.size > 1:
            raise NoPositionError(factor)
        return self.units

    def local_size(self, factor: Factor) -> int:
        return self.sizes[factor] // self.units * self.size if self.axes_of.get(factor) else self.sizes[factor]

    def index(self, factor: Factor) -> jax.Array | int:
        """The first unit of the shard; 0 for a factor that is not split.

        Raises `NoPositionError`: the shard has its part of each of several blocks.
        """
        if not self.axes_of.get(factor):
            return 0
        if self.blocks > 1:
            raise NoPositionError(factor)
        return self.first

    def offset(self, factor: Factor) -> jax.Array | int:
        return self.index(factor) * (self.sizes[factor] // self.units)


def shard_program(eqn: JaxprEqn, rule: ShardingRule, strategy: AxisStrategy, units: int, size: int = 1) -> Jaxpr:
    """The flat program of one shard: (its first unit, int32; local operands) to local results.

    `units`: number of equal units of the split factor. `size`: number of them that the shard has.

    Raises:
        NoPositionError: The operation depends on its offset along a factor split in blocks, or on the number of shards where
            they are not equal.
    """
    local = strategy.local or rule.local

    def program(first: jax.Array, *operands: jax.Array) -> Sequence[jax.Array]:
        if local is None:
            return bind_eqn(eqn, *operands)
        axes = {strategy.factor: (AXIS,)} if strategy.factor is not None else {}
        axis_sizes = {AXIS: units} if size == 1 else {}
        return list(local(eqn, _Place(axes, axis_sizes, rule.sizes, first, size, units, strategy.blocks), *operands))

    avals = [local_aval(a.aval, want, units, size) for a, want in zip(eqn.invars, strategy.operands, strict=True)]
    return flat_function(program, jax.ShapeDtypeStruct((), jnp.int32), *avals)


def has_program(eqn: JaxprEqn, rule: ShardingRule, strategy: AxisStrategy, units: int, size: int = 1) -> bool:
    """Whether the strategy has a program for such a shard: it has none if it asks for a position that the shard lacks."""
    if strategy.factor is None or (strategy.local or rule.local) is None:
        return True
    try:
        shard_program(eqn, rule, strategy, units, size)
    except (NoPositionError, KeyError):  # a `KeyError`: it asks for the axis itself
        return False
    return True


# Conversions between placements.


def shard_of(whole: jax.Array, placement: Split, first: jax.Array | int, units: int, size: int = 1) -> jax.Array:
    """A shard of a whole value: `size` of its `units` units, from `first` on."""
    dim, blocks = placement.dim, placement.blocks
    if blocks > 1:
        whole, dim = apart(whole, dim, blocks), dim + 1
    unit = whole.shape[dim] // units
    begin, length = first * unit, size * unit
    if isinstance(begin, int):
        own = jax.lax.slice_in_dim(whole, begin, begin + length, axis=dim)
    else:
        own = jax.lax.dynamic_slice_in_dim(whole, begin, length, dim)
    return own if blocks == 1 else together(own, dim - 1)


def join_shards(shards: Sequence[jax.Array], placement: Split) -> jax.Array:
    """The whole value from all of its shards, in order."""
    dim, blocks = placement.dim, placement.blocks
    if blocks == 1:
        return jax.lax.concatenate(shards, dim)
    return together(jax.lax.concatenate([apart(x, dim, blocks) for x in shards], dim + 1), dim)


def joined(placement: Placement, so_far: jax.Array, own: jax.Array, count: int) -> jax.Array:
    """An accumulator after one more of `count` shards has contributed its `own` value, as the placement says."""
    match placement:
        case Partial("sum"):
            return so_far + own.astype(so_far.dtype)
        case Partial("max"):
            return jnp.maximum(so_far, own)
        case Partial():
            return jnp.minimum(so_far, own)
        case Replicated("own") if jnp.issubdtype(own.dtype, jnp.inexact):
            return so_far + own.astype(so_far.dtype) / count
        case _:
            return own


@functools.cache
def conversion_program(shape: tuple[int, ...], dtype: np.dtype, want: Placement, count: int) -> Jaxpr:
    """The flat program (number, value) -> the value as shard `number` of `count` has it in the placement `want`.

    `Split`: the shard's part of a whole value. `Partial`: the shard's term of a sum; the first has the value, the others zeros.
    `Replicated`: the value is the shard's term of a sum, which becomes the sum as if all shards had this term.
    """

    def program(number: jax.Array, value: jax.Array) -> jax.Array:
        match want:
            case Split():
                return shard_of(value, want, number, count)
            case Partial():
                return jnp.where(number == 0, value, jnp.zeros_like(value))
            case Replicated():
                return value * jnp.asarray(count, dtype)

    return flat_function(program, jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct(shape, dtype))
