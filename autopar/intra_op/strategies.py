"""The ways to split one operation over a logical mesh, enumerated from its rule.

In:     `ShardingRule` and the mesh's axes.
Out:    `Strategy` for each assignment of mesh axes to factors: the sharding it asks of each operand, the sharding it
        gives each result, and the reductions it must do at once.
Method: each axis independently splits one factor, or carries partial sums through one linear group of operands, or is
        idle (the operation is repeated along it). Factors are split only where their length divides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.ir.rules.rule import Factor, ShardingRule, Term
from autopar.mesh import Sharding

IDLE = "-"


@dataclass(frozen=True, slots=True)
class Strategy:
    """One assignment of mesh axes to the factors of an operation.

    Attributes:
        choice: For each mesh axis, in mesh order, what it does: a factor, `+k` (carries partial sums of linear group k)
            or `-` (idle).
        axes_of: Mesh axes that split each factor, in mesh order.
        operands: Sharding asked of each operand.
        results: Sharding of each result, after `reductions`.
        reductions: (kind, axes) done at once on every result that lacks the reduced factor.
    """

    choice: tuple[str, ...]
    axes_of: Mapping[Factor, tuple[str, ...]] = field(hash=False)
    operands: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    reductions: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __str__(self) -> str:
        return " ".join(self.choice)


def enumerate_strategies(rule: ShardingRule, axis_sizes: Mapping[str, int]) -> list[Strategy]:
    """All legal strategies of `rule`, deterministic order, idle last; strategies with equal shardings are listed once.

    Args:
        rule: What the operation is.
        axis_sizes: Mesh axes and their sizes, in mesh order; axes of size 1 are always idle.
    """
    splittable = rule.splittable()
    groups = [f"+{k}" for k in range(len(rule.linear))]
    options = []
    for size in axis_sizes.values():
        fitting = [f for f in splittable if rule.sizes[f] % size == 0]
        options.append([*fitting, *groups, IDLE] if size > 1 else [IDLE])
    found: dict[tuple[object, ...], Strategy] = {}
    for choice in itertools.product(*options):
        strategy = make_strategy(rule, axis_sizes, choice)
        if strategy is not None:
            key = (strategy.operands, strategy.results, strategy.reductions)
            found.setdefault(key, strategy)
    return list(found.values())


def make_strategy(rule: ShardingRule, axis_sizes: Mapping[str, int], choice: tuple[str, ...]) -> Strategy | None:
    """The strategy in which each mesh axis does what `choice` says; None where a factor does not divide."""
    axes_of: dict[Factor, tuple[str, ...]] = {}
    partial_operands: list[list[str]] = [[] for _ in rule.operands]
    partial_results: list[str] = []
    for axis, what in zip(axis_sizes, choice, strict=True):
        if what == IDLE:
            continue
        if what.startswith("+"):
            for operand in rule.linear[int(what[1:])]:
                partial_operands[operand].append(axis)
            partial_results.append(axis)
        else:
            axes_of[what] = (*axes_of.get(what, ()), axis)
            for operand in rule.joined.get(what, ()):
                partial_operands[operand].append(axis)
    for factor, axes in axes_of.items():
        if rule.sizes[factor] % math.prod(axis_sizes[axis] for axis in axes):
            return None
    order = {axis: position for position, axis in enumerate(axis_sizes)}
    operands = tuple(
        Sharding(_split(term, axes_of), tuple(partial))
        for term, partial in zip(rule.operands, partial_operands, strict=True)
    )
    results = []
    for term in rule.results:
        present = {factor for dim in term for factor in dim}
        lost = [axis for f in rule.summed if f not in present for axis in axes_of.get(f, ())]
        results.append(Sharding(_split(term, axes_of), tuple(sorted(partial_results + lost, key=order.__getitem__))))
    reductions = tuple((kind, axes_of[f]) for f, kind in rule.reduced.items() if f in axes_of)
    wide = tuple(axis for axis, size in axis_sizes.items() if size > 1)
    if rule.once and wide:
        reductions = (("sum", wide),)
    return Strategy(choice, axes_of, operands, tuple(results), reductions)


def _split(term: Term, axes_of: Mapping[Factor, tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    return tuple(axes_of.get(dim[0], ()) if dim else () for dim in term)


def split_fraction(strategy: Strategy, axis_sizes: Mapping[str, int]) -> float:
    """Share of the operation's work that one device does: 1 / (devices over which factors are split)."""
    return 1.0 / math.prod(axis_sizes[axis] for axes in strategy.axes_of.values() for axis in axes)
