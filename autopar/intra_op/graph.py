"""The decision graph: what must be chosen to shard a program, and which choices meet where.

In:     (data only; `build_graph.py` builds it.)
Out:    `Graph`: nodes with their choices, edges on which one choice's sharding must become another's.
Method: three kinds of node. An *operation* chooses a strategy of its rule. A *port* chooses the sharding of a value at a
        boundary: an argument, an output, what enters and leaves a `scan`, `while` or `cond`; loop bodies are part of the
        same graph, their edges weighted by the trip count. A *hub* stands behind a value with several readers and
        chooses the sharding they share, so that one gather that serves q, k and v is paid once; forward pass, backward
        pass and update have a hub each. A *keep* stands between the readers of the forward pass and those of the
        backward pass, or the results of a loop's body: it chooses the sharding in which the value waits, which is made
        of the copy that the forward pass worked with. So a gather is kept or recomputed, whichever is better.
        New state has the old state's port: a port with two roles is one choice (the alias rows).
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from autopar._jax import Jaxpr, JaxprEqn, Var
from autopar.intra_op.batch import BatchDims
from autopar.intra_op.strategies import Strategy
from autopar.ir.region import Role
from autopar.mesh import LogicalMesh, Sharding

Shardings = tuple[Sharding, ...]
"""One sharding per choice of a node; equal lists are the same object, so that costs are computed once."""
Phase = typing.Literal["f", "b", "u", "o"]
PHASES: tuple[Phase, ...] = ("f", "b", "u", "o")
"""Who reads a value: the forward pass, the backward pass, what follows it, or a boundary as result of its body."""

NodeKind = typing.Literal["op", "port", "hub", "keep"]
"""As the document above tells them apart."""


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
        kind: Operation, port, hub or keep.
        name: For people and for tests: the equation, or the boundary and the value.
        strategies: Choices of an operation (empty for all others).
        shardings: Choices of a port, hub or keep.
        weight: Executions in one step.
        eqn: The operation's equation.
        rule: The operation's rule.
        carried: Its linear groups that partial sums pass.
        var: The value of a port, hub or keep.
        communicates: Whether conversions and reductions here may communicate (not inside a loop of unknown length).
        signature: Equal for nodes of a graph that have the same choices for the same reasons.
    """

    index: int
    kind: NodeKind
    name: str
    strategies: tuple[Strategy, ...] = ()
    shardings: Shardings = ()
    weight: float = 1.0
    eqn: Any = None
    rule: Any = None
    carried: tuple[int, ...] = ()
    var: Any = None
    communicates: bool = True
    signature: int = -1

    @property
    def num_choices(self) -> int:
        """Number of choices."""
        return len(self.strategies) or len(self.shardings)


@dataclass(slots=True, eq=False)
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


class Produced(NamedTuple):
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
class Tables:
    """What all programs on one mesh have in common, as far as it is known.

    Attributes:
        lists: Of equal tuples of shardings the first: they are told apart by identity.
        ports: All shardings of a shape, with partial sums or without.
        choices: Of what is equal for equal equations, their strategies, and the shardings that these want and give.
        conversions: What conversions take (`costs.py`).
        operations: Of what is equal for equal operations, what one run takes under each strategy (`costs.py`).
    """

    lists: dict[Shardings, Shardings] = field(default_factory=dict)
    ports: dict[tuple[tuple[int, ...], bool], Shardings] = field(default_factory=dict)
    choices: dict[object, tuple[tuple[Strategy, ...], list[Shardings], list[Shardings]]] = field(default_factory=dict)
    conversions: dict[tuple[Any, ...], np.ndarray] = field(default_factory=dict)
    operations: dict[tuple[Any, ...], np.ndarray] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Graph:
    """All decisions of one program on one mesh.

    Attributes:
        jaxpr: The program.
        mesh: The logical mesh.
        nodes: Decisions, in program order.
        edges: Where two decisions meet.
        produced: Origin of each value.
        op_node: Node of each plain equation.
        ports: Nodes of a structured equation's boundary, by (equation, role, index).
        hubs: Node of (value, phase) with several readers.
        keeps: Of (value, phase) whose readers get the value as it waited since an earlier phase.
        used: The copy of a value that the readers of a phase share: the hub's, or that of the only one.
        phases: Phase of each equation.
        inputs: Port of each program input.
        outputs: Port of each program output.
        batch: Which dims run over samples.
        samples: Values on edges that samples own or wait for.
        traffic: What each operation brings through memory, once that is known (`traffic.py`).
        held: Values that take memory, and how many times their bytes, once that is known (`held.held_values`).
        priced: What operations take, as far as that is known (`costs.py`).
        computes: Of operations, their instructions under choices that were lowered, by node and choice (`lower.py`).
        readers: Of programs of it that were lowered, where each phase reads each value last (`lower.py`).
        signatures: What the signature of a node stands for.
        tables: What the graphs of other programs on this mesh may share.
    """

    jaxpr: Jaxpr
    mesh: LogicalMesh
    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    produced: dict[Var, Produced] = field(default_factory=dict)
    op_node: dict[JaxprEqn, int] = field(default_factory=dict)
    ports: dict[tuple[JaxprEqn, Role, int], int] = field(default_factory=dict)
    hubs: dict[tuple[Var, Phase], int] = field(default_factory=dict)
    keeps: dict[tuple[Var, Phase], Keep] = field(default_factory=dict)
    used: dict[tuple[Var, Phase], Produced] = field(default_factory=dict)
    phases: dict[JaxprEqn, Phase] = field(default_factory=dict)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    batch: BatchDims = field(default_factory=BatchDims)
    samples: AbstractSet[Var] = frozenset()
    traffic: Any = None
    held: Mapping[Var, int] | None = None
    priced: dict[Any, Any] = field(default_factory=dict)
    computes: dict[int, dict[int, Any]] = field(default_factory=dict)
    readers: dict[Jaxpr, dict[tuple[Var, Phase], int]] = field(default_factory=dict)
    signatures: list[object] = field(default_factory=list)
    tables: Tables = field(default_factory=Tables)


def stacked(sharding: Sharding) -> Sharding:
    """The sharding of a stack of arrays that are sharded so: the leading, looped dim is whole."""
    return Sharding(((), *sharding.dims), sharding.partial)
