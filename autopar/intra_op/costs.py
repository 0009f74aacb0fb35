"""Prices every choice of a decision graph in seconds.

In:     `Graph`, the device, which choices are allowed, which nodes are tied.
Out:    `Problem`, one node per class of tied nodes.
Method: an operation costs its kernel's time on one device's share (`kernels.py`), plus its immediate reductions; an edge
        costs the cheapest reshard from the sharding given to the one wanted. Collectives of small values that do not depend
        on samples are fused (`fuse.py`), and bear a fraction of the latency each until the clock has shown what they take
        (`exposure.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autopar._jax import JaxprEqn, on_host
from autopar.cost import collective_seconds, kernel_seconds, reshard_seconds
from autopar.cost.kernels import Kernel, MemoryPass
from autopar.cost.steps import reduced_itemsize
from autopar.grouping import grouped
from autopar.intra_op.exposure import Exposure, Kind, is_sent_with_others, kind_of
from autopar.intra_op.fuse import sent_together, small_bytes
from autopar.intra_op.graph import Edge, Graph, Node, Phase, Shardings
from autopar.intra_op.kernels import is_contraction, kernel_of, kernels_of
from autopar.intra_op.problem import Problem
from autopar.intra_op.sharded import exchanged_bytes
from autopar.intra_op.traffic import Traffic, find_traffic
from autopar.ir.rules.rule import num_elements
from autopar.ir.work import num_bytes
from autopar.mesh import Device, LogicalMesh


def build_problem(
    graph: Graph,
    device: Device,
    class_of: Sequence[int],
    allowed: Mapping[int, np.ndarray] | None = None,
    exposure: Exposure | None = None,
) -> Problem:
    """The choice problem of a graph.

    Args:
        graph: The decision graph.
        device: The device.
        class_of: Class of each node; nodes of one class take the same choice (`tying.py`).
        allowed: For some nodes, which choices are allowed (pins, methods).
        exposure: The fraction of a conversion's seconds that counts; None: all.
    """
    return Prices(graph, device, class_of, allowed).problem(exposure)


_Weights = tuple[tuple[Kind, float], ...]
"""How often conversions of each kind are made in a step."""

_BEFORE_A_TRANSPOSE = 1 + 1e-6
"""Factor on conversions before a transpose: XLA's CPU collectives along a dim other than the first copy in that order, and
a gradient's dims are reversed before it is transposed like its parameter. Ties go to the conversion after the transpose."""


class Prices:
    """Seconds of all choices and of all conversions of a graph, by kind; arguments as in `build_problem`."""

    def __init__(
        self, graph: Graph, device: Device, class_of: Sequence[int], allowed: Mapping[int, np.ndarray] | None = None
    ):
        self.graph = graph
        costs = _NodeCosts(graph, device)
        members = grouped((number, node) for node, number in enumerate(class_of))
        self.costs: list[np.ndarray] = []
        for number in range(len(members)):
            alike = members[number]
            total = costs.of(graph.nodes[alike[0]])
            for node in alike[1:]:
                total = total + costs.of(graph.nodes[node])
            for mask in [allowed[node] for node in alike if node in allowed] if allowed else ():
                total = np.where(mask, total, np.inf)
            self.costs.append(total)
        self.small = small_bytes(graph.mesh)
        self.edges: dict[tuple[int, int], list[tuple[np.ndarray, _Weights]]] = {}
        numbers, kinds = graph.cached("conversions", lambda: _conversions(graph, self.small))
        weights: dict[tuple[int, int, int], dict[Kind, float]] = {}
        first: dict[tuple[int, int, int], Edge] = {}
        for edge, number, kind in zip(graph.edges, numbers, kinds, strict=True):
            key = class_of[edge.source], class_of[edge.target], number
            weight_of = weights.get(key)
            if weight_of is None:
                weight_of, first[key] = weights.setdefault(key, {}), edge
            weight_of[kind] = weight_of.get(kind, 0.0) + edge.weight
        self.copies_inner_dims = all(link.shared_memory for link in graph.mesh.links)
        self.matrices = graph.tables.conversions
        seconds: dict[tuple[bool, int], np.ndarray | None] = {}  # shared by equal conversions; None: all zero
        ways: dict[_Weights, _Weights] = {}  # few are distinct
        for key, weight_of in weights.items():
            same = self.copies_inner_dims and self.is_behind_transpose(first[key]), key[2]
            if same not in seconds:
                made = self.matrix(first[key])
                seconds[same] = made if made.any() else None
            matrix = seconds[same]
            if matrix is not None:
                way = tuple(weight_of.items())
                self.edges.setdefault(key[:2], []).append((matrix, ways.setdefault(way, way)))
        self.kinds = tuple(dict.fromkeys(kind for way in ways for kind, _ in way))

    def matrix(self, edge: Edge) -> np.ndarray:
        """Seconds of the conversion on an edge, `[source's choice, target's choice]`."""
        joins = is_sent_with_others(edge, self.small)
        table = (edge.shape, edge.itemsize, id(edge.given), id(edge.wanted), joins)
        if table not in self.matrices:
            mesh = sent_together(self.graph.mesh, num_bytes(edge.var)) if joins else self.graph.mesh
            self.matrices[table] = _matrix(edge.shape, edge.itemsize, edge.given, edge.wanted, mesh)
        matrix = self.matrices[table]
        if self.is_behind_transpose(edge):
            matrix = matrix * _BEFORE_A_TRANSPOSE
        if on_host(edge.var.aval):  # such values are copied as they are: no collective applies to them
            matrix = np.where(matrix > 0, np.inf, 0.0)
        return matrix if edge.moves is None else matrix * edge.moves.price(edge.given, edge.wanted)

    def is_behind_transpose(self, edge: Edge) -> bool:
        """Whether the conversion on an edge precedes a transpose, on a mesh whose collectives copy."""
        target = self.graph.nodes[edge.target]
        return self.copies_inner_dims and target.kind == "op" and target.name == "transpose"

    def parts(self, exposure: Exposure | None) -> tuple[float, ...]:
        """The fraction that counts for each kind of conversion; equal fractions give equal problems."""
        return tuple(1.0 if exposure is None else exposure.of(kind) for kind in self.kinds)

    def problem(self, exposure: Exposure | None = None) -> Problem:
        """The choice problem in which conversions count as far as they are exposed; None: in full."""
        problem = Problem(list(self.costs))
        parts = dict(zip(self.kinds, self.parts(exposure), strict=True))
        weighed: dict[tuple[int, float], np.ndarray] = {}  # equal tables are one object, which elimination exploits
        tables: dict[tuple[int, int], np.ndarray] = {}
        for (u, v), found in self.edges.items():
            for matrix, way in found:
                table = tables.get((id(matrix), id(way)))
                if table is None:
                    weight = sum([n * parts[kind] for kind, n in way])
                    table = weighed.get((id(matrix), weight))
                    if table is None:
                        table = weighed[id(matrix), weight] = matrix * weight
                    tables[id(matrix), id(way)] = table
                problem.add_edge(u, v, table)
        return problem


def operation_seconds(graph: Graph, device: Device) -> dict[JaxprEqn, float]:
    """Seconds of all runs of each plain equation, under its fastest choice."""
    costs = _NodeCosts(graph, device)
    return {node.eqn: float(costs.of(node).min()) for node in graph.nodes if node.kind == "op"}


class OperationSeconds:
    """Seconds of one run of each plain equation on one device under its choice, without immediate reductions."""

    def __init__(self, graph: Graph, choices: Sequence[int], device: Device):
        self.graph, self.choices, self.device = graph, choices, device
        self.traffic = find_traffic(graph)
        self.known: dict[object, float] = _known(graph, "kernels", device)

    def of(self, eqn: JaxprEqn) -> float:
        """Seconds of an equation; 0 if it is not in the graph."""
        index = self.graph.op_node.get(eqn)
        if index is None:
            return 0.0
        key = (self.graph.nodes[index].signature, self.choices[index], id(self.traffic[index]))
        if key not in self.known:
            kernel = self.kernel(index)
            idle = isinstance(kernel, MemoryPass) and not kernel.num_bytes
            self.known[key] = 0.0 if idle else kernel_seconds(kernel, self.device)
        return self.known[key]

    def kernel(self, index: int) -> Kernel:
        """The kernel that one device runs for a node."""
        node = self.graph.nodes[index]
        return kernel_of(node, node.strategies[self.choices[index]], self.traffic[index], self.graph.mesh)


def _known(graph: Graph, what: str, device: Device) -> dict[Any, Any]:
    """A cache of prices of a graph, independent of ties and of allowed choices."""
    return graph.cached((what, device), dict)


def _conversions(graph: Graph, small: float) -> tuple[list[int], list[Kind]]:
    """Per edge, a number that is equal for edges with equal seconds, and its kind."""
    numbers: dict[tuple[Any, ...], int] = {}
    kinds: dict[tuple[int, Phase, float], Kind] = {}
    number_of, kind_at = list[int](), list[Kind]()
    for edge in graph.edges:
        aval = edge.var.aval
        how = id(edge.given), id(edge.wanted), on_host(aval), edge.is_sample, edge.moves
        number = numbers.setdefault((aval.shape, aval.dtype.itemsize, *how), len(numbers))
        number_of.append(number)
        same = number, edge.phase, edge.weight
        kind = kinds.get(same)
        if kind is None:
            kind = kinds[same] = kind_of(edge, small)
        kind_at.append(kind)
    return number_of, kind_at


def _matrix(shape, itemsize: int, given: Shardings, wanted: Shardings, mesh: LogicalMesh) -> np.ndarray:
    sources, source_of = _distinct(given)
    targets, target_of = _distinct(wanted)
    table = np.asarray(reshard_seconds(shape, itemsize, sources, targets, mesh))
    return table[np.ix_(source_of, target_of)]


def _distinct(shardings: Shardings) -> tuple[Shardings, list[int]]:
    order = {s: k for k, s in enumerate(dict.fromkeys(shardings))}
    return tuple(order), [order[s] for s in shardings]


class _NodeCosts:
    """Cost vectors of nodes; those of equal signature and memory traffic are computed once."""

    def __init__(self, graph: Graph, device: Device):
        self.graph, self.device, self.mesh = graph, device, graph.mesh
        self.shares_memory = any(
            link.shared_memory for link in graph.mesh.links
        )  # devices that have no such collective
        self.traffic = find_traffic(graph)
        self.known: dict[object, np.ndarray] = _known(graph, "operations", device)

    def of(self, node: Node) -> np.ndarray:
        if node.kind != "op":
            count = len(node.shardings)
            if count not in self.known:
                self.known[count] = np.zeros(count)
            return self.known[count]
        traffic = self.traffic[node.index]
        key = (node.signature, node.weight, id(traffic))
        if key not in self.known:
            self.known[key] = node.weight * self.once(node, traffic)
        return self.known[key]

    def once(self, node: Node, traffic: Traffic) -> np.ndarray:
        """Seconds of one run, cached for all programs on the mesh."""
        key = (self.graph.signatures[node.signature], traffic, self.device)
        known = self.graph.tables.operations
        if key not in known:
            known[key] = self.operation(node, traffic)
        return known[key]

    def operation(self, node: Node, traffic: Traffic) -> np.ndarray:
        if not any(traffic.counts) and not is_contraction(node.rule):
            seconds = np.zeros(node.num_choices)
        else:
            kernels = kernels_of(node, node.strategies, traffic, self.mesh)
            seconds_of = {kernel: kernel_seconds(kernel, self.device) for kernel in dict.fromkeys(kernels)}
            seconds = np.array([seconds_of[kernel] for kernel in kernels])
        for k, strategy in enumerate(node.strategies):
            for reduction, axes in strategy.reductions if node.eqn not in self.graph.own_ends else ():
                for var, sharding in zip(node.eqn.outvars, strategy.results, strict=True):
                    elements = num_elements(tuple(var.aval.shape)) / sharding.num_shards(self.mesh)
                    size = elements * reduced_itemsize(reduction, var.aval.dtype)
                    sent = collective_seconds("all-reduce", size, axes, self.mesh)
                    seconds[k] += sent
            for size in exchanged_bytes(node.rule, node.eqn, strategy, self.mesh):
                sent = collective_seconds("ragged-all-to-all", size, strategy.exchanged_over, self.mesh)
                seconds[k] += np.inf if self.shares_memory else sent
        return seconds
