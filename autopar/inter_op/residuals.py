"""What a stage keeps between its forward and its backward pass.

In:     the equations of one stage's forward pass, the forward values its backward pass reads, and how much may be
        recomputed to keep less.
Out:    `Kept`: the values to keep, and the forward equations to recompute, which need only those.
Method: minimum cut. A value is kept, which costs its bytes, or recomputed from values that are. What is cheap is
        recomputed at no cost; what is heavy (products, convolutions, loops, random bits) at its operations, of which `level`
        are worth a byte: never at level 0, wherever a byte is saved at level inf. Between the two lie the selective ones
        (attention scores first, whole layers later), without a list of names. Among cuts of equal cost the one with the
        least to recompute, but for turning around what products made: compilers would do that twice. What lies in the
        host's memory costs nothing to keep, and no copy there or back is made twice unless memory demands it. The idea is
        that of the min-cut partitioner of PyTorch (Chen and others, "min-cut rematerialization"); the price makes it the
        Lagrangian of Korthikanti et al., "Reducing activation recomputation in large transformer models", MLSys 2023.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
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
"""The least and the greatest level: recompute only what is cheap; all that saves a byte."""
_BY_INDEX = frozenset({"scatter", "scatter-mul", "scatter-min", "scatter-max"})
"""Writing at places that others name is slow for its few operations, and its factors look like those of `concatenate`."""
_DRAWS = frozenset({"rng_uniform"})
"""Draws other numbers each time: it has a hidden state, of which no rule tells."""
_UNIT = 16
"""Capacities are counted in units of so many bytes: the flow solver takes 32-bit integers."""


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """What passes from a stage's forward to its backward.

    Attributes:
        values: Kept per microbatch in flight.
        again: Forward equations that the backward recomputes, in order.
    """

    values: tuple[Var, ...]
    again: tuple[JaxprEqn, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all kept values in devices' memory, whole."""
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
) -> Kept:
    """Choose what to keep.

    Args:
        eqns: Forward equations of the stage, in order; what others make, other stages too, can be kept and not recomputed.
        wanted: Forward values that the backward reads.
        free: Values that are at hand in both passes at no cost: parameters and what is made of next to nothing.
        level: How many operations may be recomputed for each byte that is then not kept.
    """
    free = set(free)
    made_by = makers(eqns)
    costs = _Costs(level)

    def made_of(var: Var) -> list[Var]:
        """What a value could be recomputed from."""
        eqn = made_by.get(var)
        if eqn is None or not math.isfinite(costs.of(eqn)):
            return []
        return [v for v in inputs_of(eqn) if v not in free]

    nodes = list(ancestors([v for v in wanted if v not in free], made_of))
    if not nodes:
        return Kept((), ())
    network, turned = _Network(nodes), _turned(eqns)
    for var in nodes:
        eqn = made_by.get(var)
        network.value(var, eqn, math.inf if eqn is None else costs.of(eqn), var in turned)
    for var in dict.fromkeys(wanted):
        network.read(var)
    values = network.cut()
    return Kept(tuple(values), tuple(needed(eqns, wanted, effects=False, given=free.union(values))))


def _turned(eqns: Sequence[JaxprEqn]) -> set[Var]:
    """What transposes make for elementwise work alone, which needs no order of dims: the products around it have another."""
    turned = {eqn.outvars[0] for eqn in eqns if eqn.primitive.name == "transpose"}
    readers = (eqn for eqn in eqns if not turned.isdisjoint(inputs_of(eqn)))
    heavy = [eqn for eqn in readers if not can_run_again(eqn)]
    return turned.difference(a for eqn in heavy for a in inputs_of(eqn))


def can_run_again(eqn: JaxprEqn) -> bool:
    """Whether an operation is cheap enough to be done twice: its time is that of reading and writing."""
    if not is_repeatable(eqn) or copies_to_or_from_host(eqn):
        return False
    if is_region(eqn):
        return kind_of(eqn) == "barrier"
    if not has_rule(eqn.primitive) or eqn.primitive.name in _BY_INDEX:  # without a rule of its own nothing is known
        return False
    rule = rule_for(eqn)
    elements = sum(num_elements_of(v) for v in (*eqn.outvars, *inputs_of(eqn)))
    contracts = bool(rule.summed) and sum(map(bool, rule.operands)) > 1
    # Sorted, added up along, transformed: each result needs the whole dim, and is computed, not only moved.
    left = {factor for term in rule.results for dim in term for factor in dim}
    along = rule.flops > 0 and not left.isdisjoint(rule.whole)
    return rule.flops <= 4 * elements and not contracts and not along


def is_repeatable(eqn: JaxprEqn) -> bool:
    """Whether a second run makes the same values and does nothing else."""
    if eqn.effects or eqn.primitive.name in _DRAWS:
        return False
    if is_region(eqn):
        return all(is_repeatable(inner) for body in bodies_of(eqn) for inner in body.eqns)
    return has_rule(eqn.primitive) or not rule_for(eqn).once


class _Costs:
    """What running an equation again costs, in bytes."""

    def __init__(self, level: float):
        self.level, self.work = level, Work()
        self.known: dict[JaxprEqn, float] = {}

    def of(self, eqn: JaxprEqn) -> float:
        """0 of what is cheap, inf of what may not be recomputed."""
        if eqn not in self.known:
            self.known[eqn] = self.bytes(eqn)
        return self.known[eqn]

    def bytes(self, eqn: JaxprEqn) -> float:
        if can_run_again(eqn):
            return 0.0
        if self.level == CHEAP or not is_repeatable(eqn) or any(on_host(var.aval) for var in eqn.outvars):
            return math.inf
        # How often a loop of unknown length runs is not known; it does so again only where everything does.
        unknown = kind_of(eqn) == "while" and self.level < ALL
        return math.inf if unknown else self.work.of(eqn) / self.level


class _Network:
    """A network whose cuts are the choices: a value is two nodes, and the edge between them is keeping it; an equation
    is one, and the edge from the source is running it again."""

    def __init__(self, values: Sequence[Var]):
        self.at = {var: 2 * k for k, var in enumerate(values)}
        self.source, self.sink = 2 * len(values), 2 * len(values) + 1
        self.size = self.sink + 1
        self.eqn_at: dict[JaxprEqn, int] = {}
        self.edges: list[tuple[int, int, int]] = []
        total = sum(map(_capacity, values)) + len(values) + 1
        # The solver's integers have 32 bits: coarser units for larger programs.
        self.scale = max(1, -(-total // (1 << 29)))
        self.infinite = total // self.scale + len(values) + 1

    def value(self, var: Var, eqn: JaxprEqn | None, again_bytes: float, is_turned: bool = False) -> None:
        """A value: kept, or recomputed by its equation at a cost; inf: it cannot be. Rather what it was turned from."""
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
        """The backward pass reads a value."""
        if var in self.at:
            self.edges.append((self.at[var] + 1, self.sink, self.infinite))

    def cut(self) -> list[Var]:
        """The values to keep."""
        rows, columns, capacities = zip(*self.edges, strict=True)
        graph = csr_array((np.array(capacities, np.int32), (rows, columns)), shape=(self.size, self.size))
        flow = maximum_flow(graph, self.source, self.sink).flow
        behind = _reaches(graph - flow, self.sink)
        return [var for var, k in self.at.items() if not behind[k] and behind[k + 1]]


def _capacity(var: Var) -> int:
    return -(-device_bytes(var) // _UNIT)


def _reaches(residual: csr_array, sink: int) -> np.ndarray:
    """Nodes from which the sink can be reached where capacity is left."""
    backward = csr_array(residual.T)
    backward.eliminate_zeros()
    found = np.zeros(residual.shape[0], bool)
    found[breadth_first_order(backward, sink, return_predecessors=False)] = True
    return found
