"""Proves a lower bound on the memory of every sharding of a program, to show that a budget cannot be met.

In:     the flat program, its decision graph, which choices are allowed.
Out:    `Floor`: bytes, and the moment.
Method: while an equation runs, its operands and results are alive, in shardings of one of its strategies, and so is every
        value that it depends on and that an equation depending on it reads, whatever the order of the rest and whatever is
        converted, kept or recomputed. Of each such value there is at least one copy, split as far as the mesh allows.
        At the start all arguments are alive, at the end all results. The moments that look fullest are tried.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from autopar._jax import Jaxpr, JaxprEqn, Var
from autopar.intra_op.graph import Graph, Shardings
from autopar.intra_op.held import held_values, read_from_memory
from autopar.intra_op.sharded import describe_moment
from autopar.ir.dataflow import descendants, inputs_of, needed, read_by, variables
from autopar.ir.region import is_region, region_of
from autopar.ir.work import device_bytes
from autopar.tuning import TUNING


@dataclass(frozen=True, slots=True)
class Floor:
    """A lower bound on bytes alive on one device at some moment, and a description of the moment."""

    num_bytes: float
    label: str


def memory_floor(
    graph: Graph,
    costs: Sequence[np.ndarray],
    class_of: Sequence[int],
    donated: Sequence[bool] = (),
    elsewhere: AbstractSet[Var] = frozenset(),
) -> Floor:
    """The largest lower bound over the moments tried.

    Args:
        graph: The decision graph of a program.
        costs: Per class of nodes, the costs of its choices; inf: forbidden.
        class_of: Class of each node.
        donated: Per input, whether its memory may be reused.
        elsewhere: Values that take no memory here.
    """
    return _Floors(graph, costs, class_of, elsewhere | set(_written_over(graph.jaxpr))).program(graph.jaxpr, donated)


class _Floors:
    def __init__(self, graph: Graph, costs: Sequence[np.ndarray], class_of: Sequence[int], elsewhere: AbstractSet[Var]):
        self.graph, self.elsewhere = graph, elsewhere
        self.allowed = [np.isfinite(costs[c]) for c in class_of]
        self.held = held_values(graph)
        self.rows = set(_rows(graph))
        self.most: dict[tuple[int, ...], int] = {}

    def program(self, jaxpr: Jaxpr, donated: Sequence[bool]) -> Floor:
        graph = self.graph
        given = [self.at_node(var, index) for var, index in zip(jaxpr.invars, graph.inputs, strict=True)]
        freed = donated or [False] * len(given)
        stays = {var: b for var, b, free in zip(jaxpr.invars, given, freed, strict=True) if not free}
        pairs = zip(jaxpr.outvars, graph.outputs, strict=True)
        results = {a: self.at_node(a, n) for a, n in pairs if isinstance(a, Var) and a in self.held}
        found = [Floor(sum(given), "the start"), Floor(sum({**stays, **results}.values()), "the end")]
        found += self.moments(jaxpr, stays, frozenset())
        return max(found, key=lambda floor: floor.num_bytes)

    def moments(self, jaxpr: Jaxpr, stays: Mapping[Var, float], free: Collection[Var]) -> list[Floor]:
        """Bounds at the moments of a body that look fullest; values in `free` are counted by the caller."""
        last = {var: k for k, eqn in enumerate(jaxpr.eqns) for var in inputs_of(eqn)}
        last.update(dict.fromkeys(variables(jaxpr.outvars), len(jaxpr.eqns)))
        last.update(dict.fromkeys(stays, len(jaxpr.eqns)))
        alone = {*free, *self.rows}
        size = {var: 0.0 if var in alone else self.least(var) for var in dict.fromkeys((*jaxpr.invars, *last))}
        size.update(stays)
        change = np.zeros(len(jaxpr.eqns) + 1)
        made = {var: k for k, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
        for var, end in last.items():
            change[made.get(var, 0)] += size[var]
            change[end] -= size[var] if end < len(jaxpr.eqns) else 0.0
        if not jaxpr.eqns:
            return []
        around = np.cumsum(change)[:-1] + [self.own(eqn) for eqn in jaxpr.eqns]
        order = np.argsort(-around, kind="stable")[: TUNING.floor_moments]
        return [self.moment(jaxpr, int(k), size, stays) for k in order]

    def moment(self, jaxpr: Jaxpr, position: int, size: Mapping[Var, float], stays: Mapping[Var, float]) -> Floor:
        """A bound on what is alive while one equation runs, whatever the order of the others."""
        eqn = jaxpr.eqns[position]
        mine, rest = set(inputs_of(eqn)), jaxpr.eqns[position + 1 :]
        before = read_by([eqn, *needed(jaxpr.eqns[:position], mine, effects=False)])
        behind = descendants(rest, given=eqn.outvars).keys()
        read_later = read_by((later for later in rest if not behind.isdisjoint(inputs_of(later))), jaxpr.outvars)
        waiting = [var for var in size if var not in mine and (var in stays or (var in before and var in read_later))]
        return Floor(self.own(eqn) + sum(size[var] for var in waiting), describe_moment(eqn))

    def own(self, eqn: JaxprEqn) -> float:
        """A bound on the operands and results of an equation, and on what its bodies need."""
        if not is_region(eqn):
            return self.operation(eqn)
        region, ports = region_of(eqn), self.graph.ports
        stacks: dict[object, float] = {}
        for (role, k), b in region.named():
            row = next((a for a in (*b.variables, *b.values) if isinstance(a, Var)), None)
            if row is not None and b.is_stacked:
                stack = b.result if b.operand is None else b.operand
                size = 0.0 if stack in self.elsewhere else region.trips * self.at_node(row, ports[eqn, role, k])
                stacks[stack] = min(size, stacks.get(stack, np.inf))
        passed = [v for b in region.bindings if not b.is_stacked for v in b.variables]
        inner = [floor.num_bytes for body in region.bodies for floor in self.moments(body, {}, passed)]
        return sum(stacks.values()) + max(inner, default=0.0)

    def operation(self, eqn: JaxprEqn) -> float:
        node = self.graph.nodes[self.graph.op_node[eqn]]
        total = np.zeros(node.num_choices)
        read = read_from_memory(node)
        for k, var in _first(eqn.invars):
            if var in self.held and var not in self.elsewhere and (var in read or var not in self.rows):
                total += self.bytes(var, tuple(s.operands[k] for s in node.strategies))
        for k, var in enumerate(() if node.rule.reused else eqn.outvars):  # those take the memory of operands
            if var in self.held and var not in self.elsewhere:
                total += self.bytes(var, tuple(s.results[k] for s in node.strategies))
        return float(total[self.allowed[node.index]].min(initial=np.inf))

    def at_node(self, var: Var, index: int) -> float:
        """The least bytes of a value over the shardings that a node may choose."""
        if var in self.elsewhere:
            return 0.0
        return float(self.bytes(var, self.graph.nodes[index].shardings)[self.allowed[index]].min(initial=np.inf))

    def bytes(self, var: Var, shardings: Shardings) -> np.ndarray:
        return device_bytes(var) / np.array([s.num_shards(self.graph.mesh) for s in shardings])

    def least(self, var: Var) -> float:
        """Bytes of a value that is split as far as possible; 0 if it is not held."""
        if var in self.elsewhere or var not in self.held:
            return 0.0
        shape = tuple(var.aval.shape)
        if shape not in self.most:
            self.most[shape] = _most_shards(shape, self.graph.mesh.axis_sizes)
        return device_bytes(var) / self.most[shape]


def _written_over(jaxpr: Jaxpr) -> Iterator[Var]:
    """What trips of loops may write over what the trip before has left (`sums.py`)."""
    for eqn in jaxpr.eqns:
        if is_region(eqn):
            region = region_of(eqn)
            yield from (b.value for b in region.carries if isinstance(b.value, Var))
            for body in region.bodies:
                yield from _written_over(body)


def _rows(graph: Graph) -> Iterator[Var]:
    """Rows of the stacks that loops read: they take memory only for what reads them as arrays (`versions.py`)."""
    for eqn in dict.fromkeys(eqn for eqn, _, _ in graph.ports):
        yield from (var for b in region_of(eqn).bindings if b.role == "xs" for var in b.variables)


def _first(atoms: Iterable[object]) -> list[tuple[int, Var]]:
    """Each variable, with the position of its first occurrence."""
    seen: dict[Var, int] = {}
    for k, atom in enumerate(atoms):
        if isinstance(atom, Var):
            seen.setdefault(atom, k)
    return [(k, var) for var, k in seen.items()]


def _most_shards(shape: Sequence[int], axis_sizes: Mapping[str, int]) -> int:
    """The most shards that the axes of a mesh can split an array of this shape into."""
    found = {(tuple(shape), 1)}
    for size in axis_sizes.values():
        for dims, count in list(found):
            for d, length in enumerate(dims):
                if length % size == 0 and length:
                    found.add(((*dims[:d], length // size, *dims[d + 1 :]), count * size))
    return max(count for _, count in found)
