"""The policy for the axis of layers: which values are in parts when the scans over layers are split.

In:     a flat program, the length of its scans over layers, the number of parts.
Out:    `LayerPlacements`: the solution on that axis, and the inputs and outputs that become parts.
Method: placements are propagated forwards from the stacks that scans make (`solver.py`): each part of a scan does its own
        trips, and its carries go from one part to the next. An equation that fits no strategy is computed whole, on joined
        parts. Then demand is propagated backwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar._jax import Jaxpr, JaxprEqn, Var
from autopar.ir.dataflow import inputs_of
from autopar.ir.gradient import feeds_backward
from autopar.ir.region import is_region, kind_of, region_of, trip_count
from autopar.ir.split.demand import Demand, Uses
from autopar.ir.split.layers.rows import touched_part
from autopar.ir.split.placement import REPLICATED, Axis, Placement, Split
from autopar.ir.split.solution import Solution
from autopar.ir.split.solver import Solver, StuckError
from autopar.ir.work import Work
from autopar.tuning import TUNING


class LayerPlacements:
    """The solution for one program; arguments as of `split_layers`.

    Attributes:
        chains: Scans over layers: each part does its trips, and hands its carries to the next.
        regions: Other regions that are written once per part.
        part_of: Slices and pads that touch a single part -> that part.
    """

    def __init__(
        self, jaxpr: Jaxpr, length: int, count: int, aliases: Mapping[int, int], stacked: Mapping[int, int] | None
    ):
        self.jaxpr, self.length, self.count, self.aliases = jaxpr, length, count, aliases
        self.stacked = dict(stacked or {})
        self.solution = Solution(Axis(count, length if length % count else 0))
        self.solution.placement_of.update((jaxpr.invars[k], Split(dim)) for k, dim in self.stacked.items())
        self.solver = Solver(self.solution)
        self.regions: dict[JaxprEqn, None] = {}
        self.part_of: dict[JaxprEqn, int] = {}
        costs, whole = work_of_passes(jaxpr)
        self.chains = {
            eqn: None
            for eqn, cost in zip(jaxpr.eqns, costs, strict=True)
            if is_over_stacks(eqn) and trip_count(eqn) == length and cost >= TUNING.layers_work / 4 * whole
        }

    def find_split(self) -> tuple[dict[int, int], dict[int, int]]:
        """Decide which values are split; returns the inputs and the outputs that are, each with its dim of layers."""
        for eqn in self.jaxpr.eqns:
            self.follow(eqn)
        place = {var: k for k, var in enumerate(self.jaxpr.invars)}
        # An argument that is its own new value is not read for that; if it also leaves as another result, it is read whole.
        left = [(k, a) for k, a in enumerate(self.jaxpr.outvars) if isinstance(a, Var)]
        uses: Uses = {a: {REPLICATED: None} for k, a in left if a not in place or self.aliases.get(k) != place[a]}
        _LayerDemand(self).program(uses)
        return self.split_ends(uses)

    def follow(self, eqn: JaxprEqn) -> None:
        """Propagate placements through an equation."""
        solution = self.solution
        if trip_count(eqn) == self.length:
            scan = region_of(eqn)
            if eqn in self.chains or any(solution.of(b.operand) == Split(0) for b in scan.xs):
                self.chains[eqn] = None
                solution.placement_of.update((b.result, Split(0)) for b in scan.ys if b.result is not None)
                return
        if eqn.effects or not any(isinstance(solution.of(a), Split) for a in inputs_of(eqn)):
            return
        try:
            results = self.solver.equation(eqn, inside=False)
        except StuckError:
            results = []
        if not results:
            solution.forget(eqn)
            return
        if is_region(eqn) and kind_of(eqn) != "barrier":
            self.regions[eqn] = None
        for var, placement in zip(eqn.outvars, results, strict=True):
            if placement != REPLICATED:
                solution.placement_of[var] = placement
            if not isinstance(placement, Split):
                solution.read_as[var] = REPLICATED  # parts are joined at once

    def split_ends(self, uses: Uses) -> tuple[dict[int, int], dict[int, int]]:
        """The inputs and outputs that are split, with their dims."""
        invars, outvars = self.jaxpr.invars, self.jaxpr.outvars
        replaced_by = {into: out for out, into in self.aliases.items()}
        split_in: dict[int, int] = {}
        split_out: dict[int, int] = {}
        for k, var in enumerate(invars):
            wants = uses.get(var, {})
            only = next(iter(wants), None) if len(wants) == 1 else None
            dim = self.stacked.get(k, only.dim if isinstance(only, Split) and only.blocks == 1 else None)
            if not wants or dim is None:
                continue
            out = replaced_by.get(k)
            if out is None:
                split_in[k] = dim
            elif outvars[out] is var or self.solution.of(outvars[out]) == Split(dim):
                split_in[k] = split_out[out] = dim
        return split_in, split_out


class _LayerDemand(Demand):
    """Demand on the axis of layers; a slice of single layers reads the part that holds them."""

    def __init__(self, of: LayerPlacements):
        super().__init__(of.solution, of.solver.strategies)
        self.layers = of

    def program(self, uses: Uses) -> None:
        """Propagate demand through the program; `uses` are those of its results."""
        layers, solution = self.layers, self.solution
        slices: list[tuple[JaxprEqn, int]] = []
        for eqn in reversed(layers.jaxpr.eqns):  # readers before makers
            part = touched_part(eqn, layers.length, layers.count) if eqn.primitive.name == "slice" else None
            if part is not None and eqn not in solution.strategy_of:
                slices.append((eqn, part))  # decided last: it follows the other readers
            else:
                self.read(eqn.invars, self.wants(eqn, uses), uses)
        for eqn, part in slices:
            atom = eqn.invars[0]
            if solution.of(atom) == Split(0) or list(uses.get(atom, ())) == [Split(0)]:
                layers.part_of[eqn] = part
            self.read([atom], [Split(0) if eqn in layers.part_of else REPLICATED], uses)

    def wants(self, eqn: JaxprEqn, uses: Uses) -> Sequence[Placement]:
        layers = self.layers
        if eqn in layers.chains:
            return [
                Split(0) if b.role == "xs" else REPLICATED for b in region_of(eqn).bindings if b.operand is not None
            ]
        if is_region(eqn) and kind_of(eqn) != "barrier" and eqn not in layers.regions:
            return [REPLICATED] * len(eqn.invars)
        part = touched_part(eqn, layers.length, layers.count) if eqn.primitive.name == "pad" else None
        wants = super().wants(eqn, uses)
        if part is not None and eqn not in self.solution.strategy_of:
            if list(uses.get(eqn.outvars[0], ())) == [Split(0)]:
                layers.part_of[eqn] = part
                self.solution.placement_of[eqn.outvars[0]] = Split(0)
        return wants


def work_of_passes(jaxpr: Jaxpr) -> tuple[list[float], float]:
    """The work of each equation, and the total of those of forward and backward passes (of all, without a backward pass)."""
    costs = Work().of_equations(jaxpr.eqns)
    of_passes = sum(cost for cost, matters in zip(costs, feeds_backward(jaxpr), strict=True) if matters)
    return costs, of_passes or sum(costs)


def is_over_stacks(eqn: JaxprEqn) -> bool:
    """Whether an equation is a scan of several trips that reads something row by row."""
    return trip_count(eqn) > 1 and bool(region_of(eqn).xs)
