"""The decision graph: the choices that shard a program, and the values on which they have to agree.

In:     (data only; `build_graph.py` builds it.)
Out:    `Graph`: nodes with choices, edges on which one node's sharding is converted to another's.
Method: four kinds of node. An *operation* chooses a strategy of its rule. A *port* chooses the sharding of a value at a
        boundary: an argument, an output, whatever enters or leaves a `scan`, `while` or `cond`; loop bodies are part of the
        same graph, their edges weighted by the trip count. A *hub* follows a value with several readers and chooses the
        sharding that they share, so that one gather that serves q, k and v is paid once; forward pass, backward pass and
        update have a hub each. A *keep* stands between the readers of the forward pass and those of the backward pass, or
        the results of a loop's body: it chooses the sharding in which the value waits, which is converted from the copy
        that the forward pass read. So a gather is kept or recomputed, whichever is better. New state shares the port of
        the old state, so that both are one choice.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Hashable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from autopar._jax import Jaxpr, JaxprEqn, Var
from autopar.intra_op.batch import BatchDims
from autopar.intra_op.strategies import Strategy
from autopar.ir.region import Role
from autopar.mesh import LogicalMesh, Sharding

T = typing.TypeVar("T")

Shardings = tuple[Sharding, ...]
"""One sharding per choice of a node; equal tuples are one object, so that costs are computed once."""
Phase = typing.Literal["f", "b", "u", "o"]
PHASES: tuple[Phase, ...] = typing.get_args(Phase)
"""Reader of a value: the forward pass, the backward pass, the update, or an output of the program or body."""

Choices = tuple[tuple[Strategy, ...], list[Shardings], list[Shardings]]
"""The strategies of an operation, and the shardings that these want of each operand and give each result."""

NodeKind = typing.Literal["op", "port", "hub", "keep"]
"""Explained in the module's docstring."""


class Moves(Protocol):
    """A method's preferences among conversions; equal objects have equal preferences."""

    def price(self, given: Shardings, wanted: Shardings) -> np.ndarray:
        """`[source's choice, target's choice]`: factor on the seconds of each conversion."""
        ...


@dataclass(eq=False, slots=True)
class Node:
    """One decision.

    Attributes:
        index: Position in `Graph.nodes`.
        kind: Operation, port, hub or keep.
        name: For people and tests: the primitive, or the boundary.
        strategies: Choices of an operation (empty for other kinds).
        shardings: Choices of a port, hub or keep.
        weight: Executions per step.
        eqn: The operation's equation.
        rule: The operation's rule.
        carried: The rule's linear groups through which partial sums pass.
        var: The value of a port, hub or keep.
        signature: Number that is equal for nodes with equal choices and costs; an index into `Graph.signatures`.
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
    signature: int = -1

    @property
    def num_choices(self) -> int:
        """Number of choices."""
        return len(self.strategies) or len(self.shardings)


@dataclass(slots=True, eq=False)
class Edge:
    """A value that `source` makes in sharding `given[choice]` and `target` reads in `wanted[choice]`.

    `is_sample` is False for values without batch dims that no sample waits for: parameters, gradients, optimizer state.
    `phase` is that of the readers. `moves` makes some conversions dearer; None: none.
    """

    source: int
    target: int
    slot: int
    given: Shardings
    wanted: Shardings
    var: Var
    weight: float
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
    """The origin of a value: a node, the value's sharding under each of its choices, and the index of the result."""

    node: int
    shardings: Shardings
    result: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Keep:
    """How a value waits for readers of a later phase: `node` chooses the sharding, converted from `used`, the copy that
    readers of the earlier phase share."""

    node: int
    used: Produced


@dataclass(eq=False, slots=True)
class Tables:
    """Caches that all programs on one mesh share.

    Attributes:
        lists: Tuple of shardings -> the first equal one: they are compared by identity.
        ports: (shape, whether with partial sums) -> all its shardings.
        choices: Signature of an equation -> its choices.
        forms: (form of a rule, ...) -> the choices of operations with it.
        conversions: Seconds of conversions (`costs.py`).
        operations: Signature of an operation, ... -> seconds of one run under each strategy (`costs.py`).
    """

    lists: dict[Shardings, Shardings] = field(default_factory=dict)
    ports: dict[tuple[tuple[int, ...], bool], Shardings] = field(default_factory=dict)
    choices: dict[object, Choices] = field(default_factory=dict)
    forms: dict[Hashable, Choices] = field(default_factory=dict)
    conversions: dict[tuple[Any, ...], np.ndarray] = field(default_factory=dict)
    operations: dict[tuple[Any, ...], np.ndarray] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Graph:
    """All decisions of one program on one mesh.

    Attributes:
        jaxpr: The program.
        mesh: The logical mesh.
        nodes: Decisions, in program order.
        edges: Values on which two decisions have to agree.
        produced: Origin of each value.
        op_node: Node of each plain equation.
        ports: Nodes at the boundary of a loop or branch, by (equation, role, index).
        hubs: Hub of (value, phase), for values with several readers.
        keeps: Keep of (value, phase), for values that wait since an earlier phase.
        used: (value, phase) -> the copy that the phase's readers share: the hub's, or that of the only reader.
        phases: Phase of each equation.
        inputs: Port of each program input.
        outputs: Port of each program output.
        batch: Batch dims.
        samples: Values on edges that have samples or that samples wait for.
        own_ends: The `any`s by which loops go on that end for each sample by itself: nothing is sent for them (`alone.py`).
        signatures: What each node's signature stands for.
        tables: Caches shared with other programs on this mesh.
        derived: What was computed from the graph (`cached`).
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
    own_ends: set[JaxprEqn] = field(default_factory=set)
    signatures: list[object] = field(default_factory=list)
    tables: Tables = field(default_factory=Tables)
    derived: dict[Hashable, Any] = field(default_factory=dict)

    def cached(self, key: Hashable, derive: Callable[[], T]) -> T:
        """What `derive` returns, computed once for each key; a key begins with the name of what is derived."""
        if key not in self.derived:
            self.derived[key] = derive()
        return self.derived[key]


def stacked(sharding: Sharding) -> Sharding:
    """The sharding of a stack of arrays of this sharding: the leading dim is not split."""
    return Sharding(((), *sharding.dims), sharding.partial)
