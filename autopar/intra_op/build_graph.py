"""Builds the decision graph of a program on a mesh.

In:     the flat program (`ir/trace/flatten.py`), a logical mesh; for a stage, the values and equations its passes share.
Out:    `Graph` (`graph.py`).
Method: one walk through the program and its bodies. Edges of a body are added once all its readers are known, since a value
        with several readers in a phase gets a hub. Whatever does not depend on the mesh is computed once for all meshes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

from autopar._jax import Atom, Jaxpr, JaxprEqn, Literal, Var, on_host
from autopar.intra_op.batch import between_samples, follow_batch
from autopar.intra_op.graph import (
    PHASES,
    Choices,
    Edge,
    Graph,
    Keep,
    Node,
    NodeKind,
    Phase,
    Produced,
    Shardings,
    Tables,
    stacked,
)
from autopar.intra_op.strategies import enumerate_strategies
from autopar.ir.dims import Dims
from autopar.ir.gradient import is_backward
from autopar.ir.region import Binding, Region, Role, bodies_of, is_region, region_of
from autopar.ir.rules import ShardingRule, rule_for
from autopar.ir.rules.linearity import may_be_partial, survives_infinity
from autopar.ir.signature import equation_signature
from autopar.ir.split.carries import is_done_apart
from autopar.mesh import LogicalMesh, Sharding


@dataclass(frozen=True, slots=True)
class _Place:
    """The context of an equation: executions per step, whether it is in a loop of known length."""

    weight: float = 1.0
    is_scan: bool = False


class _Kind(NamedTuple):
    """What all operations of one signature share; `number` is that of the signature."""

    rule: ShardingRule
    carried: tuple[int, ...]
    choices: Choices
    number: int


class _Read(NamedTuple):
    """A value that a node reads, with the sharding wanted under each choice of the node."""

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
    twice: AbstractSet[JaxprEqn] = frozenset(),
    like: Graph | None = None,
    tables: Tables | None = None,
) -> Graph:
    """Build the decision graph of a flat program.

    Args:
        jaxpr: Flat program without constants.
        mesh: Logical mesh.
        aliases: Output index -> input index of the state it replaces; both share one port.
        batch: Inputs whose leading dim runs over samples; or input -> its batch dims.
        anew: Values without keeps: each phase begins with them as they were made.
        twice: Equations that both the forward and the backward pass run.
        like: A graph of the same program on another mesh; what does not depend on the mesh is reused.
        tables: Tables shared with other programs on this mesh; extended.
    """
    graph = _Builder(Graph(jaxpr, mesh, tables=tables or Tables()), anew, twice, like).build(aliases)
    if like is not None:
        _take_over(graph, like)
        return graph
    rule_of = {node.eqn: node.rule for node in graph.nodes if node.kind == "op"}
    graph.batch = follow_batch(
        jaxpr, rule_of, batch if isinstance(batch, Mapping) else {k: frozenset({0}) for k in batch}
    )
    values = {edge.var for edge in graph.edges}
    if batch:
        waited_for = between_samples(jaxpr, graph.batch)
        values = {var for var in values if var in waited_for or graph.batch.dims(var)}
    _mark_samples(graph, values)
    return graph


def _mark_samples(graph: Graph, samples: AbstractSet[Var]) -> None:
    graph.samples = samples
    for edge in graph.edges:
        edge.is_sample = edge.var in samples


def _take_over(graph: Graph, like: Graph) -> None:
    graph.batch = like.batch
    _mark_samples(graph, like.samples)
    if "held" in like.derived:
        graph.derived["held"] = like.derived["held"]
    if (traffic := like.derived.get("traffic")) is not None:
        graph.derived["traffic"] = {graph.op_node[eqn]: traffic[node] for eqn, node in like.op_node.items()}


class _Builder:
    def __init__(self, graph: Graph, anew: AbstractSet[Var], twice: AbstractSet[JaxprEqn], like: Graph | None):
        self.jaxpr, self.graph, self.anew, self.twice, self.like = graph.jaxpr, graph, anew, twice, like
        self.axis_sizes = graph.mesh.axis_sizes
        self.rules: dict[object, ShardingRule] = {}
        self.kinds: dict[object, _Kind] = {}
        self.numbers: dict[object, int] = {}
        self.pending: list[list[_Read]] = []  # reads of each open body, innermost last; connected once all are known
        self.is_behind: list[bool] = []  # per open body, whether its backward pass has begun
        graph.phases.update(like.phases if like is not None else {})

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
        """Add nodes for all equations of a body; `connect` its reads afterwards."""
        self.pending.append([])
        self.is_behind.append(False)
        for eqn in jaxpr.eqns:
            if self.like is None:
                backward = is_backward(eqn)
                self.graph.phases[eqn] = "b" if backward else "u" if self.is_behind[-1] else "f"
                self.is_behind[-1] |= backward
            if is_region(eqn):
                self.region(eqn, place)
                # After a loop over microbatches, which contains both passes, comes the update.
                inner = (e for body in bodies_of(eqn) for e in body.eqns)
                self.is_behind[-1] |= any(self.graph.phases[e] == "b" for e in inner)
            else:
                self.operation(eqn, place)
        self.is_behind.pop()

    def read(self, atom: Atom, node: Node, slot: int, wanted: Shardings, eqn: JaxprEqn) -> None:
        self.pending[-1].append(_Read(atom, node, slot, wanted, self.graph.phases[eqn]))

    def connect(self, reads: Sequence[_Read], place: _Place) -> None:
        """Add the edges of a body: directly to the only reader of a value in a phase, through a hub to several."""
        by_value: dict[Var, dict[Phase, list[_Read]]] = {}
        for read in reads:
            if not isinstance(read.atom, Literal):
                by_value.setdefault(read.atom, {}).setdefault(read.phase, []).append(read)
        for var, readers_of in by_value.items():
            made = self.graph.produced[var]
            for phase in PHASES if len(readers_of) > 1 else readers_of:
                readers = readers_of.get(phase)
                if readers is None:
                    continue
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
        """The copy of a value that a phase begins with: as it was made, or from a keep since the phase before."""
        earlier = self.graph.used.get((var, "f")) or self.graph.used.get((var, "b"))
        waits = phase == "b" or (phase == "o" and place.is_scan)
        if earlier is None or not waits or var in self.anew or on_host(var.aval):
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
        self.graph.edges.append(
            Edge(made.node, node.index, slot, made.shardings, wanted, var, place.weight, phase=phase)
        )

    # Nodes

    def add(self, node: Node) -> Node:
        self.graph.nodes.append(node)
        return node

    def port(
        self,
        name: str,
        atom: Atom,
        place: _Place,
        partial: bool,
        kind: NodeKind = "port",
        only: Shardings | None = None,
    ) -> Node:
        shape, dtype = tuple(atom.aval.shape), atom.aval.dtype
        partial = partial and may_be_partial(dtype)
        shardings = only or self.all_shardings(shape, partial)
        return self.add(
            Node(
                len(self.graph.nodes),
                kind,
                name,
                shardings=shardings,
                weight=place.weight,
                var=None if isinstance(atom, Literal) else atom,
                signature=self.number((kind, name.rstrip("0123456789"), shape, dtype)),
            )
        )

    def number(self, signature: object) -> int:
        """A small integer for a signature: signatures are hashed often."""
        number = self.numbers.setdefault(signature, len(self.numbers))
        if number == len(self.graph.signatures):
            self.graph.signatures.append(signature)
        return number

    def all_shardings(self, shape: tuple[int, ...], partial: bool) -> Shardings:
        """All shardings of a value of this shape, the replicated one last."""
        known = self.graph.tables.ports
        if (shape, partial) not in known:
            known[shape, partial] = self.shared(list(_shardings(shape, self.axis_sizes, partial)))
        return known[shape, partial]

    def shared(self, shardings: Sequence[Sharding]) -> Shardings:
        key = tuple(shardings)
        return self.graph.tables.lists.setdefault(key, key)

    def operation(self, eqn: JaxprEqn, place: _Place) -> None:
        rule, carried, (strategies, wanted, given), number = self.kind(eqn)
        node = self.add(
            Node(
                len(self.graph.nodes),
                "op",
                eqn.primitive.name,
                strategies,
                weight=place.weight * (2 if eqn in self.twice else 1),
                eqn=eqn,
                rule=rule,
                carried=carried,
                signature=number,
            )
        )
        self.graph.op_node[eqn] = node.index
        reads, phase, is_twice = self.pending[-1], self.graph.phases[eqn], eqn in self.twice
        for slot, atom in enumerate(eqn.invars):
            if not isinstance(atom, Literal):
                reads.append(_Read(atom, node, slot, wanted[slot], phase))
                if is_twice:
                    reads.append(_Read(atom, node, slot, wanted[slot], "b"))
        for k, var in enumerate(eqn.outvars):
            self.graph.produced[var] = Produced(node.index, given[k], k)

    def choices(self, rule: ShardingRule, carried: tuple[int, ...]) -> Choices:
        """The strategies of a rule, and what they want and give: the same for operations of one form."""
        known, form = self.graph.tables.forms, (rule.form(self.graph.mesh.num_devices), carried)
        if form not in known:
            strategies = tuple(enumerate_strategies(rule, self.axis_sizes, carried))
            wanted = [self.shared([s.operands[k] for s in strategies]) for k in range(len(rule.operands))]
            given = [self.shared([s.results[k] for s in strategies]) for k in range(len(rule.results))]
            known[form] = strategies, wanted, given
        return known[form]

    def kind(self, eqn: JaxprEqn) -> _Kind:
        """The kind of an equation. Signatures are large: each is looked up once for all equations that share it."""
        if self.like is not None:
            known = self.like.nodes[self.like.op_node[eqn]]
            if known.signature not in self.kinds:
                signature = self.like.signatures[known.signature]
                self.kinds[known.signature] = self.new_kind(known.rule, known.carried, signature)
            return self.kinds[known.signature]
        same_rule = equation_signature(eqn)
        rule = self.rules.get(same_rule)
        if rule is None:
            rule = self.rules[same_rule] = rule_for(eqn)
        how = self.carried(eqn, rule), eqn in self.graph.own_ends
        if (id(rule), *how) not in self.kinds:
            self.kinds[(id(rule), *how)] = self.new_kind(rule, how[0], (same_rule, *how))
        return self.kinds[(id(rule), *how)]

    def new_kind(self, rule: ShardingRule, carried: tuple[int, ...], signature: object) -> _Kind:
        """The kind of operations with a rule, linear groups through which partial sums pass, and a signature."""
        known = self.graph.tables.choices
        if signature not in known:
            known[signature] = self.choices(rule, carried)
        return _Kind(rule, carried, known[signature], self.number(signature))

    def carried(self, eqn: JaxprEqn, rule: ShardingRule) -> tuple[int, ...]:
        """Linear groups through which partial sums pass: those that preserve infinities; in backward contractions, all.

        Contractions may shrink what has to be reduced (the gradient of a weight times a thin matrix is that of a LoRA
        weight); elementwise operations do not.
        """
        is_large = bool(rule.summed or rule.whole) and self.graph.phases[eqn] == "b"
        return tuple(k for k, group in enumerate(rule.linear) if is_large or survives_infinity(eqn, group))

    # Regions

    def region(self, eqn: JaxprEqn, around: _Place) -> None:
        """Add a port for each value at the boundary of a loop or branch, and the nodes of its bodies."""
        region = region_of(eqn)
        if region.kind == "while" and is_done_apart(region):
            self.graph.own_ends.update(region.bodies[0].eqns)
        within = _Place(around.weight * region.trips, region.kind == "scan")
        leaving: list[list[_Read]] = [[] for _ in region.bodies]
        for (role, k), b in region.named():
            node = self.boundary(eqn, region, role, k, b, around if b.role != "test" else within)
            outside = self.shared([stacked(s) for s in node.shardings]) if b.is_stacked else node.shardings
            if b.operand is not None:
                self.read(b.operand, node, 0, outside, eqn)
            for var in b.variables:
                self.graph.produced[var] = Produced(node.index, node.shardings)
            if b.result is not None:
                self.graph.produced[b.result] = Produced(node.index, outside)
            slots = itertools.count(0 if b.operand is None else 1)
            for reads, atom in zip(leaving, b.outputs, strict=False):
                if atom is not None:
                    reads.append(_Read(atom, node, next(slots), node.shardings, "o"))
        for body, reads in zip(region.bodies, leaving, strict=True):
            self.body(body, within)
            self.connect([*self.pending.pop(), *reads], within)

    def boundary(self, eqn: JaxprEqn, region: Region, role: Role, k: int, b: Binding, place: _Place) -> Node:
        """The port of a value at a boundary; results of loops may be partial, and all devices go on or none."""
        # A branch reads the operand itself; in a loop, the value is the body's variable.
        entering = [b.operand] if region.kind == "cond" else b.variables
        known = (*entering, None if b.is_stacked else b.result, *b.values, b.operand)
        atom = next(a for a in known if a is not None)
        partial = b.result is not None and region.kind != "cond"
        whole = self.shared([Sharding.replicated(0)]) if b.role == "test" else None
        node = self.port(f"{region.kind} {role} {k}", atom, place, partial, only=whole)
        self.graph.ports[eqn, role, k] = node.index
        return node


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
