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
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.ir.rules.rule import Factor, ShardingRule
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
    walk = _Walk(rule, axis_sizes, on_axis)
    walk.add((), {}, [()] * (len(rule.operands) + len(rule.results)))
    return list(walk.found.values())


_Ways = Sequence[tuple[str, AxisStrategy]]
_PARTIAL, _WHOLE = -1, -2
"""In place of the dim that an axis splits."""


class _Walk:
    """Chooses a strategy on one axis after the other; choices that split a factor too often end at once.

    Attributes:
        places: For each operand, then for each result, what each strategy on each axis does to it: the dim that is split,
            `_PARTIAL` or `_WHOLE`.
        found: The strategies, by all that distinguishes them.
    """

    def __init__(self, rule: ShardingRule, axis_sizes: Mapping[str, int], on_axis: Sequence[_Ways]):
        self.rule, self.axes, self.sizes, self.on_axis = rule, tuple(axis_sizes), axis_sizes, on_axis
        self.wide = tuple(axis for axis, size in axis_sizes.items() if size > 1)
        self.ndims = [len(term) for term in (*rule.operands, *rule.results)]
        every = [[(*s.operands, *s.results) for _, s in ways] for ways in on_axis]
        self.places = [[tuple(map(_place, placements)) for placements in ways] for ways in every]
        self.found: dict[tuple[object, ...], Strategy] = {}

    def add(
        self, names: tuple[str, ...], axes_of: Mapping[Factor, tuple[str, ...]], begun: Sequence[tuple[int, ...]]
    ) -> None:
        """Add all strategies that begin with these choices on the first axes.

        `axes_of`: the axes that split each factor so far. `begun`: what they do to each operand and result.
        """
        at = len(names)
        if at == len(self.axes):
            self.end(names, axes_of, begun)
            return
        for (name, strategy), places in zip(self.on_axis[at], self.places[at], strict=True):
            split = self.split(axes_of, strategy, self.axes[at])
            if split is not None:
                after = [(*before, place) for before, place in zip(begun, places, strict=True)]
                self.add((*names, name), split, after)

    def split(
        self, axes_of: Mapping[Factor, tuple[str, ...]], strategy: AxisStrategy, axis: str
    ) -> Mapping[Factor, tuple[str, ...]] | None:
        """The axes that split each factor with one more axis; None: one does not divide."""
        if strategy.factor is None:
            return axes_of
        found = dict(axes_of)
        for factor in (strategy.factor, strategy.beside) if strategy.beside is not None else (strategy.factor,):
            axes = found[factor] = (*found.get(factor, ()), axis)
            if len(axes) > 1 and self.rule.sizes[factor] % math.prod([self.sizes[each] for each in axes]):
                return None
        return found

    def end(
        self, names: tuple[str, ...], axes_of: Mapping[Factor, tuple[str, ...]], places: Sequence[tuple[int, ...]]
    ) -> None:
        """Add the strategy of a choice on every axis, unless one with equal shardings is there."""
        rule, count = self.rule, len(self.rule.operands)
        shardings = tuple([_sharding(n, self.axes, at) for n, at in zip(self.ndims, places, strict=True)])
        wanted, given = shardings[:count], shardings[count:]
        reductions = tuple([(kind, axes_of[f]) for f, kind in rule.reduced.items() if f in axes_of])
        if rule.host_call and self.wide:
            reductions = (("sum", self.wide),)
        exchange = () if rule.exchange is None else rule.exchange.axes(axes_of)
        if exchange and rule.exchange is not None:
            if exchange != axes_of[rule.exchange.group]:  # some axis splits groups without sending rows to them
                return
            along = zip(wanted, rule.exchange.along, strict=False)
            wanted = tuple([s if factor is not None else Sharding(((),) * len(s.dims)) for s, factor in along])
        key = wanted, given, reductions
        if key not in self.found:
            self.found[key] = Strategy(names, axes_of, wanted, given, reductions, exchange)


def _place(placement: Placement) -> int:
    """What an axis does to a value: the dim that it splits, `_PARTIAL` or `_WHOLE`; partial maxima and minima are reduced."""
    if isinstance(placement, Split):
        return placement.dim
    return _PARTIAL if isinstance(placement, Partial) and placement.kind == "sum" else _WHOLE


@functools.lru_cache(maxsize=1 << 16)
def _sharding(ndim: int, axes: tuple[str, ...], places: tuple[int, ...]) -> Sharding:
    """The sharding of a value of which each axis splits a dim, or is `_PARTIAL` or `_WHOLE`."""
    dims: list[tuple[str, ...]] = [()] * ndim
    for axis, dim in zip(axes, places, strict=True):
        if dim >= 0:
            dims[dim] = (*dims[dim], axis)
    return Sharding(tuple(dims), tuple([axis for axis, place in zip(axes, places, strict=True) if place == _PARTIAL]))


def split_fraction(strategy: Strategy, axis_sizes: Mapping[str, int]) -> float:
    """Fraction of the operation's work that one device does: 1 / (number of devices that its factors are split over)."""
    used = dict.fromkeys(axis for axes in strategy.axes_of.values() for axis in axes)
    return 1.0 / math.prod(axis_sizes[axis] for axis in used)
