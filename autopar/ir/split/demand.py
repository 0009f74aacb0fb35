"""Demand propagation: what is only read in parts is made in parts.

In:     a program whose placements have been followed forwards (`solver.py`), and the placements in which its results are
        read.
Out:    `Solution`, changed: a mask, random bits, a stack that is converted before it is scanned are made part by part,
        from parts of their own operands.
Method: one pass backwards, from readers to makers, into loops and branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from autopar._jax import Atom, Jaxpr, JaxprEqn, Literal, Var
from autopar.ir.region import is_region, region_of
from autopar.ir.split.placement import BY_EACH, REPLICATED, SUM, Placement, Split
from autopar.ir.split.solution import Solution, Strategies

Uses: TypeAlias = dict[Var, dict[Placement, None]]
"""For each value the placements in which it is read."""


class Demand:
    """Carries demand through one program."""

    def __init__(self, solution: Solution, strategies: Strategies):
        self.solution, self.strategies = solution, strategies

    def body(self, jaxpr: Jaxpr, uses: Uses) -> None:
        """Carry demand through a body; `uses` are those of its results, and become those of all of its values."""
        for eqn in reversed(jaxpr.eqns):
            self.read(eqn.invars, self.wants(eqn, uses), uses)

    def read(self, atoms: Sequence[Atom], wants: Sequence[Placement], uses: Uses) -> None:
        """Note that values are read."""
        for atom, want in zip(atoms, wants, strict=True):
            if not isinstance(atom, Literal):
                uses.setdefault(atom, {})[want] = None

    def wants(self, eqn: JaxprEqn, uses: Uses) -> Sequence[Placement]:
        """The placement of each operand that an equation reads, when its results are read so."""
        return self.region(eqn, uses) if is_region(eqn) else self.equation(eqn, uses)

    def equation(self, eqn: JaxprEqn, uses: Uses) -> Sequence[Placement]:
        """What a plain equation reads; it is done in parts if all readers of its results want the same parts."""
        solution = self.solution
        if eqn in solution.strategy_of:
            return solution.strategy_of[eqn].operands
        wanted = [list(uses.get(var, ())) for var in eqn.outvars]
        parts = [w[0] if len(w) == 1 and isinstance(w[0], Split) else None for w in wanted]
        in_parts = any(wanted) and all(part is not None for part, w in zip(parts, wanted, strict=True) if w)
        if in_parts and not eqn.effects:
            for strategy in self.strategies.of(eqn, [*(None for _ in eqn.invars), *parts]):
                fits = all(p is None or p == made for p, made in zip(parts, strategy.results, strict=True))
                if fits and strategy.factor is not None and SUM not in strategy.operands:
                    solution.strategy_of[eqn] = strategy
                    solution.placement_of.update(zip(eqn.outvars, strategy.results, strict=True))
                    return strategy.operands
        return [REPLICATED] * len(eqn.invars)

    def region(self, eqn: JaxprEqn, uses: Uses) -> Sequence[Placement]:
        """What a region reads; demand is carried through its bodies."""
        region, solution = region_of(eqn), self.solution
        if eqn not in solution.own_trips:
            for b in region.bindings:
                if b.result is not None and b.role in ("ys", "through"):
                    self.narrow([b.result], uses, lowest=b.lead)
            leaving = [inside for inside, _ in solution.crossing(region)]
            inner: Uses = {}
            for k, body in enumerate(region.bodies):
                self.read(body.outvars, region.leaving(k, leaving), inner)
                self.body(body, inner)
            for b in region.of_role("const", "xs"):
                self.narrow(b.variables, inner)
        return region.of_operands([outside for _, outside in solution.crossing(region)])

    def narrow(self, names: Sequence[Var], uses: Uses, lowest: int = 0) -> None:
        """A value that passes a boundary whole, under names of which each shard reads its part, passes in parts."""
        wants = list(dict.fromkeys(want for var in names for want in uses.get(var, ())))
        if self.solution.of(names[0]) in (REPLICATED, BY_EACH) and len(wants) == 1:
            if isinstance(wants[0], Split) and wants[0].dim >= lowest:
                self.solution.placement_of.update(dict.fromkeys(names, wants[0]))
