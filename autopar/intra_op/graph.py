"""The decision graph: what must be chosen to shard a program, and which choices meet where.

In:     the flat program (`ir/trace/flatten.py`) and a logical mesh.
Out:    `Graph`: nodes with their choices, edges on which one choice's sharding must become another's.
Method: three kinds of node. An *operation* chooses a strategy of its rule. A *port* chooses the sharding of a value at a
        border: an argument, an output, what enters and leaves a `scan`, `while` or `cond`; loop bodies are part of the
        same graph, their edges weighted by the trip count. A *hub* stands behind a value with several readers and
        chooses the sharding they share, so that one gather that serves q, k and v is paid once; forward pass, backward
        pass and update have a hub each. A *keep* stands between the readers of the forward pass and those of the
        backward pass, or the results of a loop's body: it chooses the sharding in which the value waits, which is made
        of the copy that the forward pass worked with. So a gather is kept or made again, whichever is better.
        New state has the old state's port: a port with two roles is one choice (the alias rows).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from autopar._jax import Atom, Jaxpr, JaxprEqn, Literal, Var
from autopar.intra_op.batch import BatchDims, Dims, between_samples, follow_batch
from autopar.intra_op.strategies import Strategy, enumerate_strategies
from autopar.ir.region import Binding, Region, bodies_of, is_region, region_of
from autopar.ir.rules import ShardingRule, rule_for
from autopar.ir.rules.linearity import may_be_partial, survives_infinity
from autopar.ir.signature import equation_signature
from autopar.ir.source import is_backward
from autopar.mesh import LogicalMesh, Sharding

Shardings = tuple[Sharding, ...]
"""One sharding per choice of a node; equal lists are the same object, so that costs are computed once."""
Phase = typing.Literal["f", "b", "u", "o"]
PHASES: tuple[Phase, ...] = ("f", "b", "u", "o")
"""Who reads a value: the forward pass, the backward pass, what follows it, or a border as result of its body."""


class Moves(Protocol):
    """How a method wants values to get to their readers; equal ones want the same."""

    def price(self, given: Shardings, wanted: Shardings) -> np.ndarray:
        """`[choice of the source, choice of the target]`: how many times its seconds each conversion counts."""
        ...


@dataclass(eq=False, slots=True)
class Node:
    """One decision.

    Attributes:
        index: Position in `Graph.nodes`.
        kind: `"op"`, `"port"`, `"hub"` or `"keep"`.
        name: For people and for tests: the equation, or the border and the value.
        strategies: Choices of an operation (empty for all others).
        shardings: Choices of a port, hub or keep.
        weight: Executions in one step.
        eqn: The operation's equation.
        rule: The operation's rule.
        var: The value of a port, hub or keep.
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

    `is_sample` is False for what no sample owns or waits for: parameters, gradients, optimizer state. `phase` is that of
    the readers behind `target`. `moves` makes some ways there dearer; None: all count as they are.
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
    phase: Phase = "f"
    moves: Moves | None = None

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


@dataclass(frozen=True, slots=True, eq=False)
class Keep:
    """How a value waits for the readers of a later phase: `node` chooses the sharding, and the copy is made of `used`,
    which the readers of the earlier phase share."""

    node: int
    used: Produced


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
        hubs: Node of (value, phase) with several readers.
        keeps: Of (value, phase) whose readers get the value as it waited since an earlier phase.
        used: The copy of a value that the readers of a phase share: the hub's, or that of the only one.
        phases: Phase of each equation, by identity.
        inputs: Port of each program input.
        outputs: Port of each program output.
        batch: Which dims run over samples.
        traffic: What each operation brings through memory, once that is known (`traffic.py`).
        held: Values that go through memory, likewise.
    """

    mesh: LogicalMesh
    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    produced: dict[Var, Produced] = field(default_factory=dict)
    op_node: dict[int, int] = field(default_factory=dict)
    ports: dict[tuple[int, str, int], int] = field(default_factory=dict)
    hubs: dict[tuple[Var, Phase], int] = field(default_factory=dict)
    keeps: dict[tuple[Var, Phase], Keep] = field(default_factory=dict)
    used: dict[tuple[Var, Phase], Produced] = field(default_factory=dict)
    phases: dict[int, Phase] = field(default_factory=dict)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    batch: BatchDims = field(default_factory=BatchDims)
    traffic: Any = None
    held: frozenset[Var] | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an equation stands: how often it runs, and whether it may communicate."""

    weight: float = 1.0
    communicates: bool = True
    is_scan: bool = False


@dataclass(frozen=True, slots=True)
class _Read:
    """A value that a node reads, in one sharding for each choice of the node."""

    atom: Atom
    node: Node
    slot: int
    wanted: Shardings
    phase: Phase


def build_graph(
    jaxpr: Jaxpr,
    mesh: LogicalMesh,
    aliases: Mapping[int, int],
    batch: Sequence[int] | Mapping[int, Dims] = (),
    anew: AbstractSet[Var] = frozenset(),
    twice: AbstractSet[int] = frozenset(),
) -> Graph:
    """The decision graph of a flat program.

    Args:
        jaxpr: Flat program without constants.
        mesh: Logical mesh.
        aliases: Output index -> input index of the state it replaces; both get one port.
        batch: Inputs whose leading dim runs over samples; or, by input, the dims that do.
        anew: Values of which no copy waits: each phase begins with them as they were made.
        twice: Equations, by identity, that both passes run.
    """
    graph = _Builder(jaxpr, mesh, anew, twice).build(aliases)
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
    def __init__(self, jaxpr: Jaxpr, mesh: LogicalMesh, anew: AbstractSet[Var], twice: AbstractSet[int]):
        self.jaxpr, self.mesh, self.anew, self.twice = jaxpr, mesh, anew, twice
        self.graph = Graph(mesh)
        self.axis_sizes = mesh.axis_sizes
        self.lists: dict[Shardings, Shardings] = {}
        self.rules: dict[object, ShardingRule] = {}
        self.choices: dict[object, tuple[tuple[Strategy, ...], list[Shardings], list[Shardings]]] = {}
        self.port_lists: dict[tuple[tuple[int, ...], bool], Shardings] = {}
        # Readers of each open body, innermost last: they wait until all are known, for a value with several gets a hub.
        self.pending: list[list[_Read]] = []
        self.is_behind: list[bool] = []  # of each open body, whether its backward pass has begun

    def build(self, aliases: Mapping[int, int]) -> Graph:
        graph = self.graph
        place = _Place()
        for position, var in enumerate(self.jaxpr.invars):
            node = self.port(f"input {position}", var, place, partial=False)
            graph.inputs.append(node.index)
            graph.produced[var] = Produced(node.index, node.shardings)
        self.body(self.jaxpr, place)
        for position, atom in enumerate(self.jaxpr.outvars):
            if position in aliases:
                node = graph.nodes[graph.inputs[aliases[position]]]
            else:
                node = self.port(f"output {position}", atom, place, partial=False)
            graph.outputs.append(node.index)
        readers = [
            _Read(atom, graph.nodes[index], -1 - k, graph.nodes[index].shardings, "o")
            for k, (atom, index) in enumerate(zip(self.jaxpr.outvars, graph.outputs, strict=True))
        ]
        self.connect([*self.pending.pop(), *readers], place)
        return graph

    def body(self, jaxpr: Jaxpr, place: _Place) -> None:
        """Nodes of all equations of one body; `connect` its readers afterwards."""
        self.pending.append([])
        self.is_behind.append(False)
        for eqn in jaxpr.eqns:
            backward = is_backward(eqn)
            self.graph.phases[id(eqn)] = "b" if backward else "u" if self.is_behind[-1] else "f"
            self.is_behind[-1] |= backward
            if is_region(eqn):
                self.region(eqn, place)
                # Behind a loop over microbatches, which holds both passes, is the update.
                inner = (e for body in bodies_of(eqn) for e in body.eqns)
                self.is_behind[-1] |= any(self.graph.phases[id(e)] == "b" for e in inner)
            else:
                self.operation(eqn, place)
        self.is_behind.pop()

    def read(self, atom: Atom, node: Node, slot: int, wanted: Shardings, eqn: JaxprEqn) -> None:
        self.pending[-1].append(_Read(atom, node, slot, wanted, self.graph.phases[id(eqn)]))

    def connect(self, reads: Sequence[_Read], place: _Place) -> None:
        """Edges of one body: straight where a value has one reader in a phase, through a hub where it has several."""
        by_value: dict[Var, dict[Phase, list[_Read]]] = {}
        for read in reads:
            if not isinstance(read.atom, Literal):
                by_value.setdefault(read.atom, {}).setdefault(read.phase, []).append(read)
        for var, readers_of in by_value.items():
            made = self.graph.produced[var]
            for phase, readers in sorted(readers_of.items(), key=lambda pair: PHASES.index(pair[0])):
                source = self.kept(var, phase, made, place)
                shared = Produced(readers[0].node.index, readers[0].wanted)
                if len(readers) > 1:
                    hub = self.port(f"hub {phase}", var, place, partial=True, kind="hub")
                    self.graph.hubs[var, phase] = hub.index
                    self.edge(source, hub, 0, hub.shardings, var, place, phase)
                    source = shared = Produced(hub.index, hub.shardings)
                for read in readers:
                    self.edge(source, read.node, read.slot, read.wanted, var, place, phase)
                self.graph.used[var, phase] = shared

    def kept(self, var: Var, phase: Phase, made: Produced, place: _Place) -> Produced:
        """The copy that a phase begins with: as the value was made, or as it waited since the phase before."""
        earlier = self.graph.used.get((var, "f")) or self.graph.used.get((var, "b"))
        waits = phase == "b" or (phase == "o" and place.is_scan)
        if earlier is None or not waits or var in self.anew or not place.communicates:
            return made
        shardings = self.all_shardings(tuple(var.aval.shape), may_be_partial(var.aval.dtype))
        if len(shardings) == 1:
            return made
        node = self.port(f"keep {phase}", var, place, partial=True, kind="keep", only=shardings)
        self.graph.keeps[var, phase] = Keep(node.index, earlier)
        self.edge(earlier, node, 0, shardings, var, place, phase)
        return Produced(node.index, shardings)

    def edge(
        self, made: Produced, node: Node, slot: int, wanted: Shardings, var: Var, place: _Place, phase: Phase
    ) -> None:
        weight, communicates = place.weight, place.communicates
        self.graph.edges.append(
            Edge(made.node, node.index, slot, made.shardings, wanted, var, weight, communicates, phase=phase)
        )

    # Nodes

    def node(self, **fields: Any) -> Node:
        node = Node(index=len(self.graph.nodes), **fields)
        self.graph.nodes.append(node)
        return node

    def port(
        self, name: str, atom: Atom, place: _Place, partial: bool, kind: str = "port", only: Shardings | None = None
    ) -> Node:
        shape, dtype = tuple(atom.aval.shape), atom.aval.dtype
        partial = partial and may_be_partial(dtype)
        shardings = only or self.all_shardings(shape, partial)
        return self.node(
            kind=kind,
            name=name,
            shardings=shardings,
            weight=place.weight,
            var=None if isinstance(atom, Literal) else atom,
            communicates=place.communicates,
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

    def operation(self, eqn: JaxprEqn, place: _Place) -> None:
        same_rule = equation_signature(eqn)
        if same_rule not in self.rules:
            self.rules[same_rule] = rule_for(eqn)
        rule = self.rules[same_rule]
        carried = self.carried(eqn, rule)
        signature = (same_rule, carried)
        if signature not in self.choices:
            strategies = tuple(enumerate_strategies(rule, self.axis_sizes, carried))
            wanted = [self.shared([s.operands[k] for s in strategies]) for k in range(len(rule.operands))]
            given = [self.shared([s.results[k] for s in strategies]) for k in range(len(rule.results))]
            self.choices[signature] = strategies, wanted, given
        strategies, wanted, given = self.choices[signature]
        node = self.node(
            kind="op",
            name=eqn.primitive.name,
            strategies=strategies,
            weight=place.weight * (2 if id(eqn) in self.twice else 1),
            eqn=eqn,
            rule=rule,
            communicates=place.communicates,
            signature=signature,
        )
        self.graph.op_node[id(eqn)] = node.index
        for slot, atom in enumerate(eqn.invars):
            self.read(atom, node, slot, wanted[slot], eqn)
            if id(eqn) in self.twice:
                self.pending[-1].append(_Read(atom, node, slot, wanted[slot], "b"))
        for k, var in enumerate(eqn.outvars):
            self.graph.produced[var] = Produced(node.index, given[k], k)

    def carried(self, eqn: JaxprEqn, rule: ShardingRule) -> tuple[int, ...]:
        """Linear groups that partial sums pass: those where infinity passes too; and all in products of gradients.

        Products of matrices, that is: they may make much smaller what is reduced (the gradient of a weight, times a thin
        matrix, is one of LoRA). What is done element by element does not.
        """
        is_large = bool(rule.summed or rule.whole) and self.graph.phases[id(eqn)] == "b"
        return tuple(k for k, group in enumerate(rule.linear) if is_large or survives_infinity(eqn, group))

    # Regions

    def region(self, eqn: JaxprEqn, around: _Place) -> None:
        """A port for each value at the border; the bodies are part of the graph."""
        region = region_of(eqn)
        within = _Place(
            around.weight * region.trips, around.communicates and region.kind != "while", region.kind == "scan"
        )
        leaving: list[list[_Read]] = [[] for _ in region.bodies]
        for (role, k), b in region.named():
            node = self.border(eqn, region, role, k, b, around if b.role != "test" else within)
            outside = self.shared([stacked(s) for s in node.shardings]) if b.is_stacked else node.shardings
            if b.outer is not None:
                self.read(b.outer, node, 0, outside, eqn)
            for var in b.variables:
                self.graph.produced[var] = Produced(node.index, node.shardings)
            if b.result is not None:
                self.graph.produced[b.result] = Produced(node.index, outside)
            slots = itertools.count(0 if b.outer is None else 1)
            for reads, atom in zip(leaving, b.inside, strict=False):
                if atom is not None:
                    reads.append(_Read(atom, node, next(slots), node.shardings, "o"))
        for body, reads in zip(region.bodies, leaving, strict=True):
            self.body(body, within)
            self.connect([*self.pending.pop(), *reads], within)

    def border(self, eqn: JaxprEqn, region: Region, role: str, k: int, b: Binding, place: _Place) -> Node:
        """The port of a value at the border; in a loop of known length, what leaves it may be partial."""
        # What a branch reads is the operand itself; what a loop reads is there for all of its trips.
        entering = [b.outer] if region.kind == "cond" else b.variables
        known = (*entering, None if b.is_stacked else b.result, *b.values, b.outer)
        atom = next(a for a in known if a is not None)
        partial = b.result is not None and region.kind in ("scan", "barrier")
        whole = self.shared([Sharding.replicated(0)]) if b.role == "test" else None
        node = self.port(f"{region.kind} {role} {k}", atom, place, partial, only=whole)
        self.graph.ports[id(eqn), role, k] = node.index
        return node


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
