"""The solver: placements followed forwards through a program, loops and branches to a fixed point.

In:     a `Solution` in which the placements of some values are known, and equations in order.
Out:    the placements of their results, and the strategies; or `StuckError`: an equation fits none.
Method: the transfer function of an equation is the cheapest of its strategies that its operands can be converted to: a
        whole value to a part of it, or to one term of a sum. A value keeps its placement across the boundary of a region;
        the placements of loop carries are joined until they settle. The caller's policy decides what becomes of an equation
        that fits no strategy (`microbatches/phases.py`, `layers/placements.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar._jax import Atom, Jaxpr, JaxprEqn, Literal, Var
from autopar.ir.dataflow import inputs_of, variables
from autopar.ir.region import Binding, Region, is_region, region_of
from autopar.ir.split.carries import is_done_apart, sum_carries
from autopar.ir.split.placement import BY_EACH, OWN, REPLICATED, SUM, Partial, Placement, Replicated, Split
from autopar.ir.split.solution import Solution, Strategies
from autopar.ir.split.strategy import AxisStrategy


@dataclass(frozen=True, slots=True)
class Cause:
    """Why an equation has no strategy: `eqn` needs the joint `operand` of all shards."""

    eqn: JaxprEqn
    operand: Var


class StuckError(Exception):
    """An equation fits no strategy."""

    def __init__(self, eqn: JaxprEqn, operand: Atom):
        super().__init__()
        assert isinstance(operand, Var), "a literal is whole"
        self.cause = Cause(eqn, operand)


class Solver:
    """Propagates placements forwards.

    Attributes:
        solution: The solution that is filled in.
        strategies: The strategies of equations on its axis.
        zeros: Values known to be zero.
        uneven: Partial sums whose terms are not alike: elements picked by index, or a value that only one shard adds. They
            cannot be estimated from one shard.
    """

    def __init__(self, solution: Solution, give_way: Callable[[Cause], bool] = lambda _: False):
        """`give_way` is asked when an equation of a body is stuck: it may change the solution, and says whether it did."""
        self.solution, self.give_way = solution, give_way
        self.strategies = Strategies(solution.axis)
        self.zeros: dict[Var, None] = {}
        self.uneven: dict[Var, None] = {}

    # One equation, anywhere.

    def equation(self, eqn: JaxprEqn, inside: bool) -> list[Placement]:
        """Placements of an equation's results.

        `eqn`: the equation; its operands' placements are known. `inside`: whether it stands in a body.

        Raises `StuckError`: it fits no strategy.
        """
        if is_region(eqn):
            return self.region(eqn)
        solution = self.solution
        placements = [solution.of(a) for a in eqn.invars]
        if all(isinstance(p, Replicated) for p in placements):
            solution.strategy_of.pop(eqn, None)
            whole = all(p == REPLICATED for p in placements)
            if whole and _is_zero(eqn):
                self.zeros.update(dict.fromkeys(eqn.outvars))
            return [REPLICATED if whole else OWN if OWN in placements else BY_EACH] * len(eqn.outvars)
        best = self.best_strategy(eqn, placements, inside)
        if best is None:
            raise StuckError(eqn, _blamed(eqn, placements))
        solution.strategy_of[eqn] = best
        self.mark_uneven(eqn, best, placements)
        return list(best.results)

    def best_strategy(self, eqn: JaxprEqn, placements: Sequence[Placement], inside: bool) -> AxisStrategy | None:
        """The strategy with the fewest conversions, the first of equals."""
        best: tuple[int, AxisStrategy] | None = None
        for strategy in self.strategies.of(eqn, placements):
            triples = zip(eqn.invars, placements, strategy.operands, strict=True)
            costs = [self.conversion(a, have, want, inside) for a, have, want in triples]
            total = sum(cost or 0 for cost in costs)
            if None not in costs and (best is None or total < best[0]):
                best = total, strategy
        return best[1] if best is not None else None

    def conversion(self, atom: Atom, have: Placement, want: Placement, inside: bool) -> int | None:
        """Number of conversions, 0 or 1, from placement `have` to `want`; None: there is none."""
        match have, want:
            case _ if have == want:
                return 0
            case Replicated(), Replicated():
                return 0 if have != REPLICATED else None
            case Replicated(), Split():
                return 1
            case Replicated(made), Partial("sum") if made != "own":
                if self.is_zero(atom):
                    return 0
                return 1 if inside or made == "each" else None
        return None

    def is_zero(self, atom: Atom) -> bool:
        """Whether a value is known to be zero."""
        return bool(atom.val == 0) if isinstance(atom, Literal) else atom in self.zeros

    def mark_uneven(self, eqn: JaxprEqn, strategy: AxisStrategy, placements: Sequence[Placement]) -> None:
        parts = zip(eqn.invars, placements, strategy.operands, strict=True)
        added_once = any(want == SUM != have and not self.is_zero(a) for a, have, want in parts)
        if strategy.is_one_hot or added_once or any(a in self.uneven for a in inputs_of(eqn)):
            self.uneven.update(dict.fromkeys(eqn.outvars))

    # Regions.

    def body(self, jaxpr: Jaxpr) -> list[Placement]:
        """Placements of a body's results, from those of its inputs."""
        for eqn in jaxpr.eqns:
            while True:
                try:
                    results = self.equation(eqn, inside=True)
                    break
                except StuckError as stuck:
                    if not self.give_way(stuck.cause):
                        raise
            self.solution.placement_of.update(zip(eqn.outvars, results, strict=True))
        return [self.solution.of(a) for a in jaxpr.outvars]

    def region(self, eqn: JaxprEqn) -> list[Placement]:
        """Placements of a region's results."""
        region = region_of(eqn)
        if any(a in self.uneven for a in inputs_of(eqn)):
            self.uneven.update(dict.fromkeys(var for b in region.bindings for var in b.variables))
        outside = [self.solution.of(b.operand) for b in region.bindings]
        of_xs = [p for b, p in zip(region.bindings, outside, strict=True) if b.role == "xs"]
        trips = [p for p in of_xs if isinstance(p, Split) and p.dim == 0]
        if region.kind == "barrier":
            results = outside
        elif trips:
            results = self.own_trips(region, trips[0])
        else:
            pairs = zip(region.bindings, outside, strict=True)
            results = self.turns(region, [self.entering(eqn, b, p) for b, p in pairs])
        if any(a in self.uneven for b in region.bindings for a in variables(b.values)):
            self.uneven.update(dict.fromkeys(eqn.outvars))
        return region.of_results(results)

    def entering(self, eqn: JaxprEqn, b: Binding, placement: Placement) -> Placement:
        """The placement in which a value enters bodies.

        Raises:
            StuckError: It is a partial maximum or minimum, which enters no body, or a test on which shards may differ.
        """
        if isinstance(placement, Partial) and placement != SUM:
            raise StuckError(eqn, b.operand)
        if b.role == "test" and not isinstance(placement, Replicated):
            raise StuckError(eqn, b.operand)
        return placement.moved(-b.lead) if isinstance(placement, Split) else placement

    def turns(self, region: Region, so_far: list[Placement]) -> list[Placement]:
        """The placement of each binding outside of a region, from a fixed point over what its bodies carry."""
        runs = [k for k in range(len(region.bodies)) if region.kind != "while" or k == 1]
        while True:
            for b, placement in zip(region.bindings, so_far, strict=True):
                self.solution.placement_of.update(dict.fromkeys(b.variables, placement))
            made = {k: iter(self.body(region.bodies[k])) for k in runs}
            left = [[next(made[k]) for k in runs if b.outputs[k] is not None] for b in region.bindings]
            grown = [
                self.joined(region, b, p, left_b) for b, p, left_b in zip(region.bindings, so_far, left, strict=True)
            ]
            settled = all(a == p for b, a, p in zip(region.bindings, grown, so_far, strict=True) if b.role == "carry")
            so_far = grown
            if settled:
                break
        if region.kind == "while":
            self.check_test(region)
        return [_leaving(b, placement) for b, placement in zip(region.bindings, so_far, strict=True)]

    def joined(self, region: Region, b: Binding, so_far: Placement, left: Sequence[Placement]) -> Placement:
        """The placement of a binding after one more turn: that so far, joined with those in which bodies leave it."""
        if b.role == "ys":  # stacks of the largest are the largest of stacks
            (so_far,) = left
            return so_far
        for placement, atom in zip(left, b.values, strict=False):
            so_far = _join(region.eqn, so_far, placement, atom)
        return so_far

    def check_test(self, loop: Region) -> None:
        """Check that shards agree on whether a loop goes on, or that each sample ends by itself."""
        (test,) = self.body(loop.bodies[0])
        (b,) = loop.of_role("test")
        if isinstance(test, Partial) and test != SUM and is_done_apart(loop) and isinstance(b.value, Var):
            self.solution.read_as[b.value] = OWN
        elif not isinstance(test, Replicated):
            raise StuckError(loop.eqn, b.value)

    def own_trips(self, scan: Region, trips: Split) -> list[Placement]:
        """Placements of a scan's bindings where each shard does its own trips; its carries must be sums, or not change."""
        of = self.solution.of
        is_sum = dict(zip((b.result for b in scan.carries), sum_carries(scan), strict=True))
        for b in scan.carries:
            if is_sum[b.result] is None:
                raise StuckError(scan.eqn, b.var)
        results: list[Placement] = []
        for b in scan.bindings:
            have = of(b.operand)
            result: Placement = REPLICATED
            match b.role:
                case "const":
                    fits = isinstance(have, Replicated)
                case "xs":
                    fits = have == trips or (isinstance(have, Replicated) and have != OWN)
                case "carry":
                    result = SUM if is_sum[b.result] else BY_EACH
                    fits = have == SUM if isinstance(have, Partial) and result == SUM else isinstance(have, Replicated)
                    fits = fits and not (result == SUM and have == OWN)
                case _:
                    result, fits = trips, True
            if not fits:
                raise StuckError(scan.eqn, b.operand)
            results.append(result)
        if scan.trips % (self.solution.axis.units * trips.blocks):
            raise StuckError(scan.eqn, next(b.operand for b in scan.xs if of(b.operand) == trips))
        self.solution.own_trips[scan.eqn] = trips
        for b in scan.carries:
            if is_sum[b.result]:
                self.solution.placement_of[b.var] = SUM
                if of(b.operand) != SUM and not self.is_zero(b.operand):
                    self.uneven[b.result] = None
        return results


def _leaving(b: Binding, placement: Placement) -> Placement:
    """The placement of a binding outside; a value that is whole inside of a region is computed by each shard."""
    if isinstance(placement, Split):
        return placement.moved(b.lead)
    return BY_EACH if placement == REPLICATED else placement


def _join(eqn: JaxprEqn, a: Placement, b: Placement, inside: Atom) -> Placement:
    """The placement to which both can be converted."""
    of_all = REPLICATED, BY_EACH
    if a == b or (b in of_all and a != REPLICATED):
        return a
    if a in of_all and not (isinstance(b, Partial) and b != SUM):
        return a if b == REPLICATED else b
    raise StuckError(eqn, inside)


def _blamed(eqn: JaxprEqn, placements: Sequence[Placement]) -> Atom:
    """The operand to blame for an equation that fits no strategy: a partial result rather than a part."""
    order = {Partial: 0, Split: 1}
    ranked = [(order[type(p)], k) for k, p in enumerate(placements) if type(p) in order]
    return eqn.invars[min(ranked)[1]]


def _is_zero(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name not in ("broadcast_in_dim", "convert_element_type"):
        return False
    value = eqn.invars[0]
    return isinstance(value, Literal) and bool(value.val == 0)
