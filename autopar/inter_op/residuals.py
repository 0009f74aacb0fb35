"""Chooses the residuals that a stage keeps between its forward and its backward pass.

In:     the equations of a stage's forward pass, the forward values its backward pass reads, a recomputation level.
Out:    `Kept`: the values to keep, and the forward equations to recompute from them.
Method: minimum cut. A value is kept, at the cost of its bytes, or recomputed from kept values. Cheap equations are
        recomputed at no cost; heavy ones (products, convolutions, loops, random bits) at their operations, `level` of which
        are worth a byte: none is recomputed at level 0, every one that saves a byte at level inf. Levels in between are
        selective (attention scores first, whole layers later), without a list of names. Ties go to the cut that recomputes
        least, except that a transpose of a product's result is recomputed: compilers would transpose twice. Values in host
        memory cost nothing to keep, and copies to or from the host are repeated only if memory demands it. The idea is
        that of the min-cut partitioner of PyTorch (Chen and others, "min-cut rematerialization"); the price makes it the
        Lagrangian of Korthikanti et al., "Reducing activation recomputation in large transformer models", MLSys 2023.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from autopar._jax import JaxprEqn, Var, copies_to_or_from_host, on_host
from autopar.ir.dataflow import ancestors, inputs_of, makers, needed
from autopar.ir.region import bodies_of, is_region, kind_of
from autopar.ir.rules import has_rule, rule_for
from autopar.ir.work import Work, device_bytes, num_elements_of

CHEAP, ALL = 0.0, math.inf
"""The least and the greatest level: recompute only cheap equations; recompute whatever saves a byte."""
_BY_INDEX = frozenset({"scatter", "scatter-mul", "scatter-min", "scatter-max"})
"""Slower than their few operations suggest; their factors look like those of `concatenate`."""
_DRAWS = frozenset({"rng_uniform"})
"""Has hidden state, so that each run draws other numbers; no rule says so."""
_UNIT = 16
"""Bytes per unit of capacity: the flow solver takes 32-bit integers."""


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """The residuals of a stage.

    Attributes:
        values: Values kept for each microbatch in flight.
        again: Forward equations that the backward recomputes, in order.
    """

    values: tuple[Var, ...]
    again: tuple[JaxprEqn, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all kept values in device memory, unsharded."""
        return sum(map(device_bytes, self.values))

    @property
    def heavy(self) -> tuple[JaxprEqn, ...]:
        """The recomputed equations that are not cheap."""
        return tuple(eqn for eqn in self.again if not can_run_again(eqn))


def choose_residuals(
    eqns: Sequence[JaxprEqn],
    wanted: Sequence[Var],
    free: Collection[Var],
    level: float = CHEAP,
    once: Collection[Var] = (),
) -> Kept:
    """Choose the residuals.

    Args:
        eqns: Forward equations of the stage, in order; values made elsewhere can be kept, but not recomputed.
        wanted: Forward values that the backward reads.
        free: Values available to both passes at no cost: parameters and results of light equations.
        level: Operations that may be recomputed for each byte saved.
        once: Values that are not recomputed.
    """
    free = set(free)
    made_by = {var: eqn for var, eqn in makers(eqns).items() if var not in once}
    again_bytes = _again_bytes(level)

    def made_of(var: Var) -> list[Var]:
        """The operands that a value can be recomputed from; [] if it cannot."""
        eqn = made_by.get(var)
        if eqn is None or not math.isfinite(again_bytes(eqn)):
            return []
        return [v for v in inputs_of(eqn) if v not in free]

    nodes = list(ancestors([v for v in wanted if v not in free], made_of))
    if not nodes:
        return Kept((), ())
    network, turned = _Network(nodes), _turned(eqns)
    for var in nodes:
        eqn = made_by.get(var)
        network.value(var, eqn, math.inf if eqn is None else again_bytes(eqn), var in turned)
    for var in dict.fromkeys(wanted):
        network.read(var)
    values = network.cut()
    return Kept(tuple(values), tuple(needed(eqns, wanted, effects=False, given=free.union(values))))


def _turned(eqns: Sequence[JaxprEqn]) -> set[Var]:
    """Results of transposes read by elementwise work alone, which could as well work in the order of dims before it."""
    turned = {eqn.outvars[0] for eqn in eqns if eqn.primitive.name == "transpose"}
    readers = (eqn for eqn in eqns if not turned.isdisjoint(inputs_of(eqn)))
    heavy = [eqn for eqn in readers if not can_run_again(eqn)]
    return turned.difference(a for eqn in heavy for a in inputs_of(eqn))


def can_run_again(eqn: JaxprEqn) -> bool:
    """Whether an equation is cheap enough to run twice: repeatable, and bound by memory traffic."""
    if not is_repeatable(eqn) or copies_to_or_from_host(eqn):
        return False
    if is_region(eqn):
        return kind_of(eqn) == "barrier"
    if not has_rule(eqn.primitive) or eqn.primitive.name in _BY_INDEX:  # without a sharding rule its cost is unknown
        return False
    rule = rule_for(eqn)
    elements = sum(num_elements_of(v) for v in (*eqn.outvars, *inputs_of(eqn)))
    contracts = bool(rule.summed) and sum(map(bool, rule.operands)) > 1
    # Sorts, cumulative sums, transforms: each element needs the whole dim, and is computed, not only moved.
    left = {factor for term in rule.results for dim in term for factor in dim}
    along = rule.flops > 0 and not left.isdisjoint(rule.whole)
    return rule.flops <= 4 * elements and not contracts and not along


def is_repeatable(eqn: JaxprEqn) -> bool:
    """Whether a second run gives the same values and has no effects."""
    if eqn.effects or eqn.primitive.name in _DRAWS:
        return False
    if is_region(eqn):
        return all(is_repeatable(inner) for body in bodies_of(eqn) for inner in body.eqns)
    return has_rule(eqn.primitive) or not rule_for(eqn).host_call


def _again_bytes(level: float) -> Callable[[JaxprEqn], float]:
    """A function from an equation to the cost of recomputing it, in bytes: 0 if it is cheap, inf if it may not be."""
    work = Work()

    @functools.cache
    def cost(eqn: JaxprEqn) -> float:
        if can_run_again(eqn):
            return 0.0
        if level == CHEAP or not is_repeatable(eqn) or any(on_host(var.aval) for var in eqn.outvars):
            return math.inf
        # The trip count of a `while` is unknown: it is recomputed only at level `ALL`.
        return math.inf if kind_of(eqn) == "while" and level < ALL else work.of(eqn) / level

    return cost


class _Network:
    """A flow network whose cuts are the choices: cutting the edge between a value's two nodes keeps the value; cutting the
    edge from the source to an equation's node recomputes the equation."""

    def __init__(self, values: Sequence[Var]):
        self.at = {var: 2 * k for k, var in enumerate(values)}
        self.source, self.sink = 2 * len(values), 2 * len(values) + 1
        self.size = self.sink + 1
        self.eqn_at: dict[JaxprEqn, int] = {}
        self.edges: list[tuple[int, int, int]] = []
        total = sum(map(_capacity, values)) + len(values) + 1
        # Larger programs need coarser units to fit the solver's 32-bit integers.
        self.scale = max(1, -(-total // (1 << 29)))
        self.infinite = total // self.scale + len(values) + 1

    def value(self, var: Var, eqn: JaxprEqn | None, again_bytes: float, is_turned: bool = False) -> None:
        """Add a value; `eqn` recomputes it at a cost (inf: it cannot). A turned value costs one more unit to keep, so that
        ties keep its untransposed operand."""
        enters = self.at[var]
        self.edges.append((enters, enters + 1, max(1, _capacity(var) // self.scale) + is_turned))
        if eqn is None or not math.isfinite(again_bytes):
            self.edges.append((self.source, enters, self.infinite))
            return
        if eqn not in self.eqn_at:
            at = self.eqn_at[eqn] = self.size
            self.size += 1
            if again_bytes:
                cost = min(again_bytes / _UNIT / self.scale, self.infinite)
                self.edges.append((self.source, at, max(1, round(cost))))
            for operand in dict.fromkeys(inputs_of(eqn)):
                if operand in self.at:
                    self.edges.append((self.at[operand] + 1, at, self.infinite))
        self.edges.append((self.eqn_at[eqn], enters, self.infinite))

    def read(self, var: Var) -> None:
        """Add a value that the backward pass reads."""
        if var in self.at:
            self.edges.append((self.at[var] + 1, self.sink, self.infinite))

    def cut(self) -> list[Var]:
        """Solve for the minimum cut: the values to keep."""
        rows, columns, capacities = zip(*self.edges, strict=True)
        graph = csr_array((np.array(capacities, np.int32), (rows, columns)), shape=(self.size, self.size))
        flow = maximum_flow(graph, self.source, self.sink).flow
        behind = _reaches(graph - flow, self.sink)
        return [var for var, k in self.at.items() if not behind[k] and behind[k + 1]]


def _capacity(var: Var) -> int:
    return -(-device_bytes(var) // _UNIT)


def _reaches(residual: csr_array, sink: int) -> np.ndarray:
    """The nodes that can reach the sink over edges with residual capacity."""
    backward = csr_array(residual.T)
    backward.eliminate_zeros()
    found = np.zeros(residual.shape[0], bool)
    found[breadth_first_order(backward, sink, return_predecessors=False)] = True
    return found
