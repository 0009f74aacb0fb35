"""Seconds for every choice of a decision graph.

In:     `Graph`, the device, which choices are allowed, which nodes are tied.
Out:    `Problem`, one node per class of tied nodes.
Method: an operation costs its kernel's time on one device's share (`kernels.py`), plus the reductions it does at once; an
        edge costs the cheapest reshard from the sharding given to the one wanted. Small values that no sample owns are
        sent together (`fuse.py`) and bear a part of the latency each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from autopar._jax import JaxprEqn, Literal, Var
from autopar.cost import collective_seconds, kernel_seconds, reshard_seconds
from autopar.cost.kernels import Pass
from autopar.intra_op.fuse import BUCKET_BYTES, small_bytes
from autopar.intra_op.graph import Graph, Node, Shardings
from autopar.intra_op.kernels import is_contraction, kernel_of
from autopar.intra_op.problem import Problem
from autopar.intra_op.traffic import Traffic, find_held, find_traffic, is_pointwise
from autopar.ir.rules.rule import num_elements
from autopar.mesh import Device, LogicalMesh

FUSED_SHARE = 0.1
"""Part of its latency that a small collective bears where others like it are ready too: parameters, gradients and
optimizer state are many, and `fuse.py` sends them together. More where only a few of its size go into one message."""


def build_problem(
    graph: Graph, device: Device, class_of: Sequence[int], allowed: Mapping[int, np.ndarray] | None = None
) -> Problem:
    """The choice problem of a graph.

    Args:
        graph: Decisions and where they meet.
        device: Rates of one device.
        class_of: Class of each node; nodes of one class take the same choice (`tying.py`).
        allowed: For some nodes, which choices are allowed (pins, methods).
    """
    problem = Problem()
    costs = _NodeCosts(graph, device)
    members: dict[int, list[int]] = {}
    for node, number in enumerate(class_of):
        members.setdefault(number, []).append(node)
    for number in range(len(members)):
        first = graph.nodes[members[number][0]]
        total = np.zeros(first.num_choices)
        for node in members[number]:
            total = total + costs.of(graph.nodes[node])
            if allowed is not None and node in allowed:
                total = np.where(allowed[node], total, np.inf)
        problem.costs.append(total)
    weights: dict[tuple[Any, ...], float] = {}
    lists: dict[int, Shardings] = {}
    for edge in graph.edges:
        u, v = class_of[edge.source], class_of[edge.target]
        lists_of = (id(edge.given), id(edge.wanted))
        key = (u, v, edge.shape, edge.itemsize, *lists_of, edge.communicates, edge.is_sample, edge.moves)
        weights[key] = weights.get(key, 0.0) + edge.weight
        lists[id(edge.given)], lists[id(edge.wanted)] = edge.given, edge.wanted
    matrices: dict[tuple[Any, ...], np.ndarray] = {}
    small = small_bytes(graph.mesh)
    for (u, v, shape, itemsize, given, wanted, communicates, is_sample, moves), weight in weights.items():
        size = num_elements(shape) * itemsize
        joins = not is_sample and size <= small
        table = (shape, itemsize, given, wanted, joins)
        if table not in matrices:
            mesh = _sent_together(graph.mesh, size) if joins else graph.mesh
            matrices[table] = _matrix(shape, itemsize, lists[given], lists[wanted], mesh)
        matrix = matrices[table] if communicates else np.where(matrices[table] > 0, np.inf, 0.0)
        if moves is not None:
            matrix = matrix * moves.price(lists[given], lists[wanted])
        if matrix.any():
            problem.add_edge(u, v, matrix * weight)
    return problem


def operation_seconds(graph: Graph, device: Device) -> dict[int, float]:
    """Of each plain equation, by identity, the seconds of all its runs under the choice that takes least."""
    costs = _NodeCosts(graph, device)
    return {id(node.eqn): float(costs.of(node).min()) for node in graph.nodes if node.kind == "op"}


class OperationSeconds:
    """Seconds of one run of each plain equation under its choice on one device, reductions at once left out."""

    def __init__(self, graph: Graph, choices: Sequence[int], device: Device):
        self.graph, self.choices, self.device = graph, choices, device
        self.traffic = find_traffic(graph)
        self.known: dict[object, float] = {}

    def of(self, eqn: JaxprEqn) -> float:
        """Seconds of an equation of the graph; of one that is not in it, none."""
        index = self.graph.op_node.get(id(eqn))
        if index is None:
            return 0.0
        node, choice, traffic = self.graph.nodes[index], self.choices[index], self.traffic[index]
        key = (node.signature, choice, traffic)
        if key not in self.known:
            kernel = kernel_of(node, node.strategies[choice], traffic, self.graph.mesh)
            idle = isinstance(kernel, Pass) and not kernel.num_bytes
            self.known[key] = 0.0 if idle else kernel_seconds(kernel, self.device)
        return self.known[key]


def _sent_together(mesh: LogicalMesh, num_bytes: float) -> LogicalMesh:
    """The mesh as a small collective sees it that is sent with others: it bears a part of the latency."""
    share = max(FUSED_SHARE, num_bytes / BUCKET_BYTES)
    links = tuple(dataclasses.replace(link, latency_seconds=link.latency_seconds * share) for link in mesh.links)
    return LogicalMesh(mesh.shape, mesh.axis_names, links)


def _matrix(shape, itemsize: int, given: Shardings, wanted: Shardings, mesh: LogicalMesh) -> np.ndarray:
    sources, source_of = _distinct(given)
    targets, target_of = _distinct(wanted)
    table = np.asarray(reshard_seconds(shape, itemsize, sources, targets, mesh))
    return table[np.ix_(source_of, target_of)]


def _distinct(shardings: Shardings) -> tuple[Shardings, list[int]]:
    order = {s: k for k, s in enumerate(dict.fromkeys(shardings))}
    return tuple(order), [order[s] for s in shardings]


class _NodeCosts:
    """Cost vectors of operations; those with equal signatures and equal memory traffic are computed once."""

    def __init__(self, graph: Graph, device: Device):
        self.graph, self.device, self.mesh = graph, device, graph.mesh
        self.traffic = find_traffic(graph)
        self.known: dict[object, np.ndarray] = {}

    def of(self, node: Node) -> np.ndarray:
        if node.kind != "op":
            return np.zeros(node.num_choices)
        traffic = self.traffic[node.index]
        key = (node.signature, node.weight, traffic, node.communicates)
        if key not in self.known:
            self.known[key] = node.weight * self.operation(node, traffic)
        return self.known[key]

    def operation(self, node: Node, traffic: Traffic) -> np.ndarray:
        if not any(traffic.counts) and not is_contraction(node.rule):
            seconds = np.zeros(node.num_choices)
        else:
            kernels = [kernel_of(node, strategy, traffic, self.mesh) for strategy in node.strategies]
            seconds = np.array([kernel_seconds(kernel, self.device) for kernel in kernels])
        for k, strategy in enumerate(node.strategies):
            for _, axes in strategy.reductions:
                for var, sharding in zip(node.eqn.outvars, strategy.results, strict=True):
                    num_bytes = num_elements(tuple(var.aval.shape)) * var.aval.dtype.itemsize
                    num_bytes /= sharding.num_shards(self.mesh)
                    seconds[k] += (
                        collective_seconds("all-reduce", num_bytes, axes, self.mesh) if node.communicates else np.inf
                    )
        return seconds


def stored_values(graph: Graph) -> set[Var]:
    """Values that go through memory: made or read by anything but chains of pointwise operations."""
    stored: set[Var] = set()
    read: set[Var] = set()
    for node in graph.nodes:
        if node.kind != "op":
            if node.kind == "port" and node.var is not None:
                stored.add(node.var)
            continue
        pointwise = is_pointwise(node)
        single = len([o for o in node.rule.operands if o]) <= 1
        for atom in node.eqn.invars:
            if not isinstance(atom, Literal):
                read.add(atom)
                if not pointwise and not single:
                    stored.add(atom)
        if not pointwise:
            stored.update(node.eqn.outvars)
    return stored


def held_values(graph: Graph) -> AbstractSet[Var]:
    """Values that take memory while they wait, as kernels are priced (`traffic.py`)."""
    return find_held(graph)
