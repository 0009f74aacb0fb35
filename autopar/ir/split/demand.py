"""Demand propagation: a value of which every reader wants the same parts is made in parts.

In:     a program whose placements have been followed forwards (`solver.py`), and the placements in which its results are
        read.
Out:    `Solution`, changed: masks, random bits, a stack that is cast before a scan reads it are made part by part, from
        parts of their operands.
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
"""The placements in which each value is read."""


class Demand:
    """Carries demand through one program."""

    def __init__(self, solution: Solution, strategies: Strategies):
        self.solution, self.strategies = solution, strategies

    def body(self, jaxpr: Jaxpr, uses: Uses) -> None:
        """Propagate demand through a body: `uses`, given for its results, is filled in for all of its values."""
        for eqn in reversed(jaxpr.eqns):
            self.read(eqn.invars, self.wants(eqn, uses), uses)

    def read(self, atoms: Sequence[Atom], wants: Sequence[Placement], uses: Uses) -> None:
        """Record that values are read in these placements."""
        for atom, want in zip(atoms, wants, strict=True):
            if not isinstance(atom, Literal):
                uses.setdefault(atom, {})[want] = None

    def wants(self, eqn: JaxprEqn, uses: Uses) -> Sequence[Placement]:
        """The placement in which an equation reads each operand, given how its results are read."""
        return self.region(eqn, uses) if is_region(eqn) else self.equation(eqn, uses)

    def equation(self, eqn: JaxprEqn, uses: Uses) -> Sequence[Placement]:
        """The same for a plain equation; it is split if all readers of its results want the same parts."""
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
        """The same for a region; demand is propagated through its bodies."""
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
        """Split a value that crosses the boundary of a region whole, if all its readers beyond want the same part."""
        wants = list(dict.fromkeys(want for var in names for want in uses.get(var, ())))
        if self.solution.of(names[0]) in (REPLICATED, BY_EACH) and len(wants) == 1:
            if isinstance(wants[0], Split) and wants[0].dim >= lowest:
                self.solution.placement_of.update(dict.fromkeys(names, wants[0]))
