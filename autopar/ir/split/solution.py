"""The solution for a program on one axis: the placement of every value, the strategy of every equation.

In:     (types only; `solver.py` and `demand.py` fill them.)
Out:    `Solution`; `Strategies`: those of each equation, looked up once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from autopar._jax import Atom, JaxprEqn, Var
from autopar.ir.region import Binding, Region, bodies_of
from autopar.ir.rules import rule_for
from autopar.ir.signature import equation_signature
from autopar.ir.split.blocks import block_strategies
from autopar.ir.split.placement import OWN, REPLICATED, Axis, Placement, Replicated, Split, units_of_shard
from autopar.ir.split.strategy import AxisStrategy, has_program, strategies


@dataclass(eq=False, slots=True)
class Solution:
    """A program on one axis.

    Attributes:
        axis: The axis.
        placement_of: The placement in which each value is made; a value without one is replicated.
        strategy_of: The strategy of each plain equation; one without a strategy is computed as it stands.
        own_trips: Scans whose trips are split, so that each shard does its own; with the placement of their stacks.
        read_as: Values that are read otherwise than shards make them: whole, computed once outside of the axis, or each
            shard's own in place of the joint one (local statistics).
    """

    axis: Axis
    placement_of: dict[Var, Placement] = field(default_factory=dict)
    strategy_of: dict[JaxprEqn, AxisStrategy] = field(default_factory=dict)
    own_trips: dict[JaxprEqn, Split] = field(default_factory=dict)
    read_as: dict[Var, Replicated] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of shards."""
        return self.axis.count

    def of(self, atom: Atom | None) -> Placement:
        """The placement in which a value is read."""
        return self.read_as.get(atom) or self.made_as(atom) if isinstance(atom, Var) else REPLICATED

    def made_as(self, var: Var) -> Placement:
        """The placement in which a value is made."""
        return self.placement_of.get(var, REPLICATED)

    def crossing(self, region: Region) -> list[tuple[Placement, Placement]]:
        """For each binding of a region its placements inside and outside."""
        own = self.own_trips.get(region.eqn)
        return [self._crossing(b, own) for b in region.bindings]

    def _crossing(self, b: Binding, own_trips: Split | None) -> tuple[Placement, Placement]:
        if b.role == "test":
            return OWN, OWN
        inside = self.made_as(b.variables[0]) if b.variables else REPLICATED
        if b.role in ("ys", "result", "through") and b.result is not None:
            inside = self.made_as(b.result)
            return (inside.moved(-b.lead) if isinstance(inside, Split) else inside), inside
        if isinstance(inside, Split):
            return inside, inside.moved(b.lead)
        return inside, own_trips if b.is_stacked and own_trips is not None else inside

    def forget(self, eqn: JaxprEqn) -> None:
        """Drop what is known of an equation and of its bodies."""
        self.strategy_of.pop(eqn, None)
        self.own_trips.pop(eqn, None)
        for var in eqn.outvars:
            self.placement_of.pop(var, None)
        for body in bodies_of(eqn):
            for var in body.invars:
                self.placement_of.pop(var, None)
            for inner in body.eqns:
                self.forget(inner)


Phase: TypeAlias = Literal["before", "loop", "between", "after"]


@dataclass(eq=False, slots=True)
class LoopSolution(Solution):
    """The solution for a step whose shards are microbatches, processed by a loop.

    Attributes:
        phase: Where each top-level equation runs: `"before"` the loop (it needs no sample), in the `"loop"`, `"between"`
            the forward passes of all microbatches and their backward passes (`joins.py`), or `"after"` the loop.
        early: Top-level equations that also run before the loop, on the whole batch.
    """

    phase: dict[JaxprEqn, Phase] = field(default_factory=dict)
    early: dict[JaxprEqn, None] = field(default_factory=dict)


class Strategies:
    """The strategies of equations on an axis, cached by signature."""

    def __init__(self, axis: Axis):
        self.axis = axis
        self.signatures: dict[JaxprEqn, object] = {}
        self.plain: dict[object, list[AxisStrategy]] = {}
        self.in_blocks: dict[object, list[AxisStrategy]] = {}

    def of(self, eqn: JaxprEqn, placements: Sequence[Placement | None]) -> list[AxisStrategy]:
        """The strategies of a plain equation.

        `placements`: of its operands, then of its results, as far as known; those split in blocks allow more strategies.
        """
        signature = self.signatures.get(eqn)
        if signature is None:
            signature = self.signatures[eqn] = equation_signature(eqn)
        if signature not in self.plain:
            rule, units = rule_for(eqn), self.axis.units
            size = units_of_shard(0, self.axis.count, units).size
            found = strategies(rule, units)
            self.plain[signature] = [s for s in found if size == 1 or has_program(eqn, rule, s, units, size)]
        if not self.axis.is_even:
            return self.plain[signature]
        known = tuple(p if isinstance(p, Split) else None for p in placements)
        if (signature, known) not in self.in_blocks:
            found = block_strategies(eqn, rule_for(eqn), self.axis.count, known) if any(known) else []
            self.in_blocks[signature, known] = found
        return self.plain[signature] + self.in_blocks[signature, known]
