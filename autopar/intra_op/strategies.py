"""Enumerates the strategies of an operation on a logical mesh from its sharding rule.

In:     `ShardingRule` and the mesh's axes.
Out:    a `Strategy` for each assignment of mesh axes to factors: the sharding wanted of each operand, the sharding of each
        result, and immediate reductions.
Method: each axis independently takes one of the strategies for a single axis (`ir/split/strategy.py`): it splits one
        factor; or carries partial sums through one linear group of operands; or is idle (the operation is replicated over
        it); or rows are sent along it to the devices of their groups (`RowExchange`). A factor is split only if its length
        divides.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.ir.rules.rule import Factor, ShardingRule, Term
from autopar.ir.split.placement import REPLICATED, Partial, Placement, Reduction, Split
from autopar.ir.split.strategy import AxisStrategy, exchanges, strategies
from autopar.mesh import Sharding

IDLE = "-"


@dataclass(frozen=True, slots=True)
class Strategy:
    """One assignment of mesh axes to the factors of an operation.

    Attributes:
        choice: Per mesh axis, in mesh order: a factor, `p>g` (rows are sent from parts p to groups g), `+k` (carries
            partial sums of linear group k) or `-` (idle).
        axes_of: Mesh axes that split each factor, in mesh order.
        operands: Sharding wanted of each operand.
        results: Sharding of each result, after `reductions`.
        reductions: (kind, axes) reduced immediately, for every result that lacks the reduced factor.
        exchanged_over: Axes along which rows are sent to the devices of their groups, and results are sent back.
    """

    choice: tuple[str, ...]
    axes_of: Mapping[Factor, tuple[str, ...]] = field(hash=False)
    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    reductions: tuple[tuple[Reduction, tuple[str, ...]], ...] = ()
    exchanged_over: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join(self.choice)


def enumerate_strategies(
    rule: ShardingRule, axis_sizes: Mapping[str, int], carried: Collection[int] | None = None
) -> list[Strategy]:
    """All legal strategies of `rule`, in deterministic order, idle last; strategies with equal shardings are listed once.

    Args:
        rule: The operation's rule.
        axis_sizes: Mesh axes and their sizes, in mesh order; axes of size 1 are always idle.
        carried: Indices of the linear groups through which partial sums may be carried; None: all of them.
    """
    idle = AxisStrategy(None, (REPLICATED,) * len(rule.operands), (REPLICATED,) * len(rule.results))
    on_axis = []
    for size in axis_sizes.values():
        ways = [s for s in strategies(rule, size) if s.factor is not None or carried is None or s.group in carried]
        named = [(s.factor or f"+{s.group}", s) for s in ways]
        named += [(f"{s.factor}>{s.beside}", s) for s in exchanges(rule, size)]
        on_axis.append([*(named if size > 1 else ()), (IDLE, idle)])
    found: dict[tuple[object, ...], Strategy] = {}
    axes = tuple(axis_sizes)
    operands = [_shards(t, axes, [[s.operands[k] for _, s in w] for w in on_axis]) for k, t in enumerate(rule.operands)]
    results = [_shards(t, axes, [[s.results[k] for _, s in w] for w in on_axis]) for k, t in enumerate(rule.results)]
    for numbers in itertools.product(*(range(len(ways)) for ways in on_axis)):
        chosen = [ways[number] for ways, number in zip(on_axis, numbers, strict=True)]
        strategy = _together(rule, axis_sizes, chosen, numbers, operands, results)
        if strategy is not None:
            key = (strategy.operands, strategy.results, strategy.reductions)
            found.setdefault(key, strategy)
    return list(found.values())


_Shards = Callable[[Sequence[int]], Sharding]


def _shards(term: Term, axes: Sequence[str], placements: Sequence[Sequence[Placement]]) -> _Shards:
    """The sharding of a value as a function of the strategy on each axis, given by index; cached by its placements.

    `placements`: per axis, the value's placement under each strategy on it.
    """
    first = [[ways.index(placement) for placement in ways] for ways in placements]

    @functools.cache
    def sharding(numbers: tuple[int, ...]) -> Sharding:
        at = zip(axes, placements, numbers, strict=True)
        return _sharding(term, [(axis, ways[number]) for axis, ways, number in at])

    return lambda numbers: sharding(tuple(map(list.__getitem__, first, numbers)))


def _together(
    rule: ShardingRule,
    axis_sizes: Mapping[str, int],
    chosen: Sequence[tuple[str, AxisStrategy]],
    numbers: Sequence[int],
    operands: Sequence[_Shards],
    results: Sequence[_Shards],
) -> Strategy | None:
    """Combine the strategies chosen for each axis, given also by index; None: a factor does not divide."""
    axes_of: dict[Factor, tuple[str, ...]] = {}
    for axis, (_, on_axis) in zip(axis_sizes, chosen, strict=True):
        for factor in (on_axis.factor, on_axis.beside):
            if factor is not None:
                axes_of[factor] = (*axes_of.get(factor, ()), axis)
    for factor, axes in axes_of.items():
        if rule.sizes[factor] % math.prod(axis_sizes[axis] for axis in axes):
            return None
    reductions = tuple((kind, axes_of[f]) for f, kind in rule.reduced.items() if f in axes_of)
    wide = tuple(axis for axis, size in axis_sizes.items() if size > 1)
    if rule.host_call and wide:
        reductions = (("sum", wide),)
    wanted, given = tuple([of(numbers) for of in operands]), tuple([of(numbers) for of in results])
    exchange = () if rule.exchange is None else rule.exchange.axes(axes_of)
    if exchange and rule.exchange is not None:
        if exchange != axes_of[rule.exchange.group]:  # some axis splits groups without sending rows to them
            return None
        along = zip(wanted, rule.exchange.along, strict=False)
        wanted = tuple([s if factor is not None else Sharding(((),) * len(s.dims)) for s, factor in along])
    return Strategy(tuple([name for name, _ in chosen]), axes_of, wanted, given, reductions, exchange)


def _sharding(term: Term, placements: Sequence[tuple[str, Placement]]) -> Sharding:
    """The sharding of a value from its placement on each axis; partial maxima and minima count as reduced."""
    dims: list[tuple[str, ...]] = [()] * len(term)
    partial: tuple[str, ...] = ()
    for axis, placement in placements:
        if isinstance(placement, Split):
            dims[placement.dim] = (*dims[placement.dim], axis)
        elif isinstance(placement, Partial) and placement.kind == "sum":
            partial = (*partial, axis)
    return Sharding(tuple(dims), partial)


def split_fraction(strategy: Strategy, axis_sizes: Mapping[str, int]) -> float:
    """Fraction of the operation's work that one device does: 1 / (number of devices that its factors are split over)."""
    used = dict.fromkeys(axis for axes in strategy.axes_of.values() for axis in axes)
    return 1.0 / math.prod(axis_sizes[axis] for axis in used)
