"""The decision graph: what must be chosen to shard a program, and which choices meet where.

In:     the flat program (`ir/trace/flatten.py`) and a logical mesh.
Out:    `Graph`: nodes with their choices, edges on which one choice's sharding must become another's.
Method: three kinds of node. An *operation* chooses a strategy of its rule. A *port* chooses the sharding of a value at a
        border: an argument, an output, what enters and leaves a `scan`, `while` or `cond`; loop bodies are part of the
        same graph, their edges weighted by the trip count. A *hub* stands behind a value with several readers and
        chooses the sharding they share, so that one gather that serves q, k and v is paid once; forward and backward
        readers have a hub each, so that gathering again may be preferred to keeping.
        New state has the old state's port: a port with two roles is one choice (the alias rows).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar._jax import Jaxpr, JaxprEqn, Literal, Var
from autopar.intra_op.batch import BatchDims, Dims, between_samples, follow_batch
from autopar.intra_op.strategies import Strategy, enumerate_strategies
from autopar.ir.rules import ShardingRule, rule_for
from autopar.ir.rules.linearity import may_be_partial
from autopar.ir.signature import equation_signature
from autopar.ir.source import is_backward
from autopar.ir.structure import body_jaxprs, is_structured, scan_parts, trip_count, while_parts
from autopar.mesh import LogicalMesh, Sharding

Shardings = tuple[Sharding, ...]
"""One sharding per choice of a node; equal lists are the same object, so that costs are computed once."""


@dataclass(eq=False, slots=True)
class Node:
    """One decision.

    Attributes:
        index: Position in `Graph.nodes`.
        kind: `"op"`, `"port"` or `"hub"`.
        name: For people and for tests: the equation, or the border and the value.
        strategies: Choices of an operation (empty for ports and hubs).
        shardings: Choices of a port or hub.
        weight: Executions in one step.
        eqn: The operation's equation.
        rule: The operation's rule.
        var: The value of a port or hub.
        communicates: Whether conversions and reductions here may communicate (not inside a loop of unknown length).
        signature: Equal for nodes that have the same choices for the same reasons.
    """

    index: int
    kind: str
    name: str
    strategies: tuple[Strategy, ...] = ()
    shardings: Shardings = ()
    weight: float = 1.0
    eqn: Any = None
    rule: Any = None
    var: Any = None
    communicates: bool = True
    signature: object = None

    @property
    def num_choices(self) -> int:
        """Number of choices."""
        return len(self.strategies) or len(self.shardings)


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """The value `shape` made by `source` in `given[choice]` must reach `target` in `wanted[choice]`.

    `is_sample` is False for what no sample owns or waits for: parameters, gradients, optimizer state.
    """

    source: int
    target: int
    slot: int
    given: Shardings
    wanted: Shardings
    var: Var
    weight: float
    communicates: bool = True
    is_sample: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape of the value."""
        return tuple(self.var.aval.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one of its elements."""
        return self.var.aval.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Produced:
    """Where a value comes from: a node, and the value's sharding for each of its choices."""

    node: int
    shardings: Shardings
    result: int = 0


@dataclass(eq=False, slots=True)
class Graph:
    """All decisions of one program on one mesh.

    Attributes:
        mesh: The logical mesh.
        nodes: Decisions, in program order.
        edges: Where two decisions meet.
        produced: Origin of each value.
        op_node: Node of each plain equation, by identity.
        ports: Nodes of a structured equation's border, by (equation identity, role, index).
        hubs: Node of (value, backward) with several readers.
        inputs: Port of each program input.
        outputs: Port of each program output.
        batch: Which dims run over samples.
        traffic: What each operation brings through memory, once that is known (`traffic.py`).
    """

    mesh: LogicalMesh
    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    produced: dict[Var, Produced] = field(default_factory=dict)
    op_node: dict[int, int] = field(default_factory=dict)
    ports: dict[tuple[int, str, int], int] = field(default_factory=dict)
    hubs: dict[tuple[Var, bool], int] = field(default_factory=dict)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    batch: BatchDims = field(default_factory=BatchDims)
    traffic: Any = None


@dataclass(frozen=True, slots=True)
class _Region:
    """Where an equation stands: how often it runs, and whether it may communicate."""

    weight: float = 1.0
    communicates: bool = True


def build_graph(
    jaxpr: Jaxpr, mesh: LogicalMesh, aliases: Mapping[int, int], batch: Sequence[int] | Mapping[int, Dims] = ()
) -> Graph:
    """The decision graph of a flat program.

    Args:
        jaxpr: Flat program without constants.
        mesh: Logical mesh.
        aliases: Output index -> input index of the state it replaces; both get one port.
        batch: Inputs whose leading dim runs over samples; or, by input, the dims that do.
    """
    graph = _Builder(jaxpr, mesh).build(aliases)
    rule_of = {id(node.eqn): node.rule for node in graph.nodes if node.kind == "op"}
    graph.batch = follow_batch(
        jaxpr, rule_of, batch if isinstance(batch, Mapping) else {k: frozenset({0}) for k in batch}
    )
    if batch:
        waited_for = between_samples(jaxpr, graph.batch)
        graph.edges = [
            dataclasses.replace(e, is_sample=bool(graph.batch.dims(e.var)) or e.var in waited_for) for e in graph.edges
        ]
    return graph


class _Builder:
    def __init__(self, jaxpr: Jaxpr, mesh: LogicalMesh):
        self.jaxpr, self.mesh = jaxpr, mesh
        self.graph = Graph(mesh)
        self.axis_sizes = mesh.axis_sizes
        self.lists: dict[Shardings, Shardings] = {}
        self.rules: dict[object, tuple[ShardingRule, tuple[Strategy, ...], list[Shardings], list[Shardings]]] = {}
        self.port_lists: dict[tuple[tuple[int, ...], bool], Shardings] = {}
        # Readers of each open body, innermost last: they wait until all are known, for a value with several gets a hub.
        self.pending: list[list[tuple[object, Node, int, Shardings, float, bool]]] = []

    def build(self, aliases: Mapping[int, int]) -> Graph:
        graph = self.graph
        region = _Region()
        for position, var in enumerate(self.jaxpr.invars):
            node = self.port(f"input {position}", var, region, partial=False)
            graph.inputs.append(node.index)
            graph.produced[var] = Produced(node.index, node.shardings)
        self.body(self.jaxpr, region)
        for position, atom in enumerate(self.jaxpr.outvars):
            if position in aliases:
                node = graph.nodes[graph.inputs[aliases[position]]]
            else:
                node = self.port(f"output {position}", atom, region, partial=False)
            graph.outputs.append(node.index)
        readers = [
            (atom, graph.nodes[index], -1 - k, graph.nodes[index].shardings, 1.0)
            for k, (atom, index) in enumerate(zip(self.jaxpr.outvars, graph.outputs, strict=True))
        ]
        self.connect(self.pending.pop(), readers, region)
        return graph

    def body(self, jaxpr: Jaxpr, region: _Region) -> None:
        """Nodes of all equations of one body; `connect` its readers afterwards."""
        self.pending.append([])
        for eqn in jaxpr.eqns:
            if is_structured(eqn):
                self.structured(eqn, region)
            else:
                self.operation(eqn, region)

    def read(self, atom: Any, node: Node, slot: int, wanted: Shardings, backward: bool, weight: float = 1.0) -> None:
        self.pending[-1].append((atom, node, slot, wanted, weight, backward))

    def connect(self, reads: list, outputs: list, region: _Region) -> None:
        """Edges of one body: straight where a value has one reader in its phase, through a hub where it has several."""
        by_value: dict[tuple[Var, bool], list] = {}
        for atom, node, slot, wanted, weight, backward in reads:
            if not isinstance(atom, Literal):
                by_value.setdefault((atom, backward), []).append((node, slot, wanted, weight))
        for atom, node, slot, wanted, weight in outputs:
            if not isinstance(atom, Literal):
                by_value.setdefault((atom, True), []).append((node, slot, wanted, weight))
        for (var, backward), readers in by_value.items():
            made = self.graph.produced[var]
            if len(readers) > 1:
                hub = self.port(f"hub {'b' if backward else 'f'}", var, region, partial=True, kind="hub")
                hub.signature = ("hub", backward, tuple(var.aval.shape), str(var.aval.dtype))
                self.graph.hubs[var, backward] = hub.index
                self.edge(made, hub, 0, hub.shardings, var, region.weight, region)
                made = Produced(hub.index, hub.shardings)
            for node, slot, wanted, weight in readers:
                self.edge(made, node, slot, wanted, var, region.weight * weight, region)

    def edge(
        self, made: Produced, node: Node, slot: int, wanted: Shardings, var: Var, weight: float, region: _Region
    ) -> None:
        self.graph.edges.append(
            Edge(made.node, node.index, slot, made.shardings, wanted, var, weight, region.communicates)
        )

    # Nodes

    def node(self, **fields: Any) -> Node:
        node = Node(index=len(self.graph.nodes), **fields)
        self.graph.nodes.append(node)
        return node

    def port(
        self, name: str, atom: Any, region: _Region, partial: bool, kind: str = "port", only: Shardings | None = None
    ) -> Node:
        shape, dtype = tuple(atom.aval.shape), atom.aval.dtype
        partial = partial and may_be_partial(dtype)
        shardings = only or self.all_shardings(shape, partial)
        return self.node(
            kind=kind,
            name=name,
            shardings=shardings,
            weight=region.weight,
            var=None if isinstance(atom, Literal) else atom,
            communicates=region.communicates,
            signature=(kind, name.rstrip("0123456789"), shape, str(dtype)),
        )

    def all_shardings(self, shape: tuple[int, ...], partial: bool) -> Shardings:
        """Every sharding of a value of this shape, the replicated one last."""
        if (shape, partial) not in self.port_lists:
            self.port_lists[shape, partial] = self.shared(list(_shardings(shape, self.axis_sizes, partial)))
        return self.port_lists[shape, partial]

    def shared(self, shardings: Sequence[Sharding]) -> Shardings:
        key = tuple(shardings)
        return self.lists.setdefault(key, key)

    def operation(self, eqn: JaxprEqn, region: _Region) -> None:
        signature = equation_signature(eqn)
        if signature not in self.rules:
            rule = rule_for(eqn)
            strategies = tuple(enumerate_strategies(rule, self.axis_sizes))
            wanted = [self.shared([s.operands[k] for s in strategies]) for k in range(len(rule.operands))]
            given = [self.shared([s.results[k] for s in strategies]) for k in range(len(rule.results))]
            self.rules[signature] = rule, strategies, wanted, given
        rule, strategies, wanted, given = self.rules[signature]
        node = self.node(
            kind="op",
            name=eqn.primitive.name,
            strategies=strategies,
            weight=region.weight,
            eqn=eqn,
            rule=rule,
            communicates=region.communicates,
            signature=signature,
        )
        self.graph.op_node[id(eqn)] = node.index
        backward = is_backward(eqn)
        for slot, atom in enumerate(eqn.invars):
            self.read(atom, node, slot, wanted[slot], backward)
        for k, var in enumerate(eqn.outvars):
            self.graph.produced[var] = Produced(node.index, given[k], k)

    # Structured equations

    def structured(self, eqn: JaxprEqn, region: _Region) -> None:
        match eqn.primitive.name:
            case "scan":
                self.scan(eqn, region)
            case "while":
                self.while_loop(eqn, region)
            case "cond":
                self.cond(eqn, region)
            case "optimization_barrier":
                self.barrier(eqn, region)
            case name:
                raise AssertionError(f"`{name}` is called structured, but the graph cannot take it apart.")

    def border(
        self,
        eqn: JaxprEqn,
        role: str,
        k: int,
        atom: Any,
        region: _Region,
        partial: bool,
        only: Shardings | None = None,
    ) -> Node:
        node = self.port(f"{eqn.primitive.name} {role} {k}", atom, region, partial, only=only)
        self.graph.ports[id(eqn), role, k] = node.index
        return node

    def close_body(self, outputs: list, region: _Region) -> None:
        self.connect(self.pending.pop(), outputs, region)

    def scan(self, eqn: JaxprEqn, region: _Region) -> None:
        graph, parts, backward = self.graph, scan_parts(eqn), is_backward(eqn)
        inner = _Region(region.weight * trip_count(eqn), region.communicates)
        for k, (outer, var) in enumerate(parts.consts):
            node = self.border(eqn, "const", k, var, region, partial=False)
            self.read(outer, node, 0, node.shardings, backward)
            graph.produced[var] = Produced(node.index, node.shardings)
        carries = []
        for k, (outer, var, _, result) in enumerate(parts.carries):
            node = self.border(eqn, "carry", k, var, region, partial=True)
            carries.append(node)
            self.read(outer, node, 0, node.shardings, backward)
            graph.produced[var] = graph.produced[result] = Produced(node.index, node.shardings)
        for k, (outer, var) in enumerate(parts.xs):
            node = self.border(eqn, "xs", k, var, region, partial=False)
            self.read(outer, node, 0, self.shared([stacked(s) for s in node.shardings]), backward)
            graph.produced[var] = Produced(node.index, node.shardings)
        self.body(parts.body, inner)
        outputs = [
            (inside, node, 1, node.shardings, 1.0)
            for (_, _, inside, _), node in zip(parts.carries, carries, strict=True)
        ]
        for k, (inside, result) in enumerate(parts.ys):
            node = self.border(eqn, "ys", k, inside, region, partial=True)
            outputs.append((inside, node, 0, node.shardings, 1.0))
            graph.produced[result] = Produced(node.index, self.shared([stacked(s) for s in node.shardings]))
        self.close_body(outputs, inner)

    def while_loop(self, eqn: JaxprEqn, region: _Region) -> None:
        graph, parts, backward = self.graph, while_parts(eqn), is_backward(eqn)
        inner = _Region(region.weight, communicates=False)
        for role, consts in (("cond const", parts.cond_consts), ("body const", parts.body_consts)):
            for k, (outer, var) in enumerate(consts):
                node = self.border(eqn, role, k, var, region, partial=False)
                self.read(outer, node, 0, node.shardings, backward)
                graph.produced[var] = Produced(node.index, node.shardings)
        carries = []
        for k, (outer, cond_var, var, _, result) in enumerate(parts.carries):
            node = self.border(eqn, "carry", k, var, region, partial=False)
            carries.append(node)
            self.read(outer, node, 0, node.shardings, backward)
            for seen in (cond_var, var, result):
                graph.produced[seen] = Produced(node.index, node.shardings)
        self.body(parts.cond_body, inner)
        predicate = self.border(
            eqn, "predicate", 0, parts.predicate, inner, partial=False, only=self.shared([Sharding.replicated(0)])
        )
        self.close_body([(parts.predicate, predicate, 0, predicate.shardings, 1.0)], inner)
        self.body(parts.body, inner)
        self.close_body(
            [
                (inside, node, 1, node.shardings, 1.0)
                for (_, _, _, inside, _), node in zip(parts.carries, carries, strict=True)
            ],
            inner,
        )

    def cond(self, eqn: JaxprEqn, region: _Region) -> None:
        graph, backward = self.graph, is_backward(eqn)
        branches = body_jaxprs(eqn)
        index = self.border(
            eqn, "index", 0, eqn.invars[0], region, partial=False, only=self.shared([Sharding.replicated(0)])
        )
        self.read(eqn.invars[0], index, 0, index.shardings, backward)
        operands = [
            self.border(eqn, "operand", k, atom, region, partial=False) for k, atom in enumerate(eqn.invars[1:])
        ]
        for atom, node in zip(eqn.invars[1:], operands, strict=True):
            self.read(atom, node, 0, node.shardings, backward)
        results = [self.border(eqn, "result", k, var, region, partial=False) for k, var in enumerate(eqn.outvars)]
        for var, node in zip(eqn.outvars, results, strict=True):
            graph.produced[var] = Produced(node.index, node.shardings)
        for number, branch in enumerate(branches):
            for var, node in zip(branch.invars, operands, strict=True):
                graph.produced[var] = Produced(node.index, node.shardings)
            self.body(branch, region)
            self.close_body(
                [(atom, node, number, node.shardings, 1.0) for atom, node in zip(branch.outvars, results, strict=True)],
                region,
            )

    def barrier(self, eqn: JaxprEqn, region: _Region) -> None:
        for k, (atom, var) in enumerate(zip(eqn.invars, eqn.outvars, strict=True)):
            node = self.border(eqn, "through", k, var, region, partial=True)
            self.read(atom, node, 0, node.shardings, is_backward(eqn))
            self.graph.produced[var] = Produced(node.index, node.shardings)


def stacked(sharding: Sharding) -> Sharding:
    """The sharding of a stack of arrays that are sharded so: the leading, looped dim is whole."""
    return Sharding(((), *sharding.dims), sharding.partial)


def _shardings(shape: tuple[int, ...], axis_sizes: Mapping[str, int], partial: bool) -> Iterator[Sharding]:
    options = [
        [*(d for d, length in enumerate(shape) if length > 1 and length % size == 0), *(["+"] if partial else []), None]
        if size > 1
        else [None]
        for size in axis_sizes.values()
    ]
    for choice in itertools.product(*options):
        dims = tuple(tuple(a for a, c in zip(axis_sizes, choice, strict=True) if c == d) for d in range(len(shape)))
        if all(length % math.prod(axis_sizes[a] for a in axes) == 0 for length, axes in zip(shape, dims, strict=True)):
            yield Sharding(dims, tuple(a for a, c in zip(axis_sizes, choice, strict=True) if c == "+"))
