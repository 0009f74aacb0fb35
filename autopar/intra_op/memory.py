"""Builds memory rows: the bytes alive at one moment, as a function of the choices.

In:     the copies alive at the peaks of a lowered program.
Out:    `MemoryRow`s over the classes of nodes that determine the size of these copies.
Method: a copy's owner is the node that chose its sharding: the first one whose readers are still to come; for every other
        choice of that node the row has the size that the copy would have. A second copy of a value exists only if its owner
        wants another sharding than the owner of the first. A copy on the way to another one is attributed to that one's
        owner, under its present choice only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autopar._jax import Var
from autopar.intra_op.graph import PHASES, Graph, Node, Phase, Shardings
from autopar.intra_op.held import held_values
from autopar.intra_op.liveness import Alive, Liveness, fullest_moments, packed_bytes
from autopar.intra_op.problem import MemoryRow
from autopar.intra_op.sharded import Body, Compute, Fused, Gate, Instruction, Move, Region, describe_moment
from autopar.intra_op.traffic import is_fused
from autopar.intra_op.workspace import workspace_at, workspace_bytes
from autopar.ir.dataflow import inputs_of
from autopar.ir.work import num_bytes
from autopar.mesh import Sharding
from autopar.tuning import TUNING


def broken_memory_rows(
    graph: Graph, class_of: Sequence[int], choices: Sequence[int], body: Body, donated: Sequence[bool], budget: float
) -> list[MemoryRow]:
    """Rows for the peaks at which a lowered program exceeds the budget; [] if it fits.

    Args:
        graph: The decision graph.
        class_of: Class of each node.
        choices: Choice of each class.
        body: The program under these choices.
        donated: Per input of the program, whether its memory may be reused.
        budget: Bytes per device.
    """
    moments = fullest_moments(body, graph.mesh, held_values(graph), donated, TUNING.memory_rows)
    return rows_of(graph, class_of, choices, moments, budget)


def rows_of(
    graph: Graph, class_of: Sequence[int], choices: Sequence[int], moments: Sequence[Liveness], budget: float
) -> list[MemoryRow]:
    """Rows for those of a program's peaks that exceed the budget; arguments as in `broken_memory_rows`."""
    over = [moment for moment in moments if moment.peak_bytes > budget]
    if not over:
        return []
    owners = _Owners(graph, class_of, choices)
    return [_row(owners, moment, budget) for moment in over]


def _place(at: Instruction | None) -> str:
    """A description of a moment: what is computed then, or which reader a collective serves."""
    match at:
        case None:
            return "the start"
        case Compute() | Region():
            return describe_moment(at.eqn)
        case Gate():
            return "a wait"
        case Move():
            return f"the {at.step} before {at.reader}"
        case Fused():
            return f"the {at.moves[0].step} of {len(at.moves)} arrays before {at.moves[0].reader}"


def _row(owners: _Owners, liveness: Liveness, budget: float) -> MemoryRow:
    """The row for one moment: whatever is chosen, what is alive then has to fit."""
    row, mesh = _Row(owners.graph, owners.class_of), owners.graph.mesh
    found = [(owners.of(alive), alive) for alive in liveness.alive]
    first_of: dict[Var, _Owner] = {}
    # Makers come first, then keeps, then hubs, then readers, as in `_Owners._line`.
    for (_, owner, is_chosen), alive in sorted(found, key=lambda entry: entry[0].rank):
        var = alive.copy[0]
        if owner is None:
            row.constant += alive.num_bytes
        elif not is_chosen:
            row.add_here(owner, owners.choices, alive.num_bytes)
        elif (other := owners.merges_with(var, owner)) is not None:
            row.add(var, other, owner, alive.times)
        else:
            row.add(var, first_of.setdefault(var, owner), owner, alive.times)
    for move in liveness.packed:
        ends = [owners.find(move.var, end, "fbuo").owner for end in (move.source, move.target)]
        if ends[0] is None or ends[1] is None:
            row.constant += packed_bytes(move, mesh)
        else:
            row.add(move.var, ends[0], ends[1], packed=True)
    if isinstance(liveness.at, Compute) and workspace_at(liveness.at, mesh):
        row.add_workspace(owners.graph.nodes[owners.graph.op_node[liveness.at.eqn]])
    return MemoryRow(_place(liveness.at), row.bytes_of, budget, row.constant, row.pairs)


_Owner = tuple[int, Shardings]
"""A node that chooses a sharding for a value, and the value's sharding under each of its choices."""


class _Owned(NamedTuple):
    """Who owns a copy of a value.

    Attributes:
        rank: The owner's position among the nodes that choose a sharding of the value.
        owner: The node; None: unknown.
        is_chosen: Whether it chose the copy's sharding; else the copy is on the way to its own.
    """

    rank: int
    owner: _Owner | None
    is_chosen: bool = True


class _Row:
    """Accumulates a memory row."""

    def __init__(self, graph: Graph, class_of: Sequence[int]):
        self.mesh, self.class_of = graph.mesh, class_of
        self.bytes_of: dict[int, np.ndarray] = {}
        self.pairs: dict[tuple[int, int], np.ndarray] = {}
        self.constant = 0.0

    def add(self, var: Var, first: _Owner, owner: _Owner, times: int = 1, packed: bool = False) -> None:
        """Add `times` instances of the owner's copy of a value: unconditionally if `owner` is `first`; else where their
        shardings differ.

        `packed`: where they differ, add the copies of both.
        """
        (u, theirs), (v, ours) = first, owner
        numbers = self.class_of[u], self.class_of[v]
        size = times * self._bytes(var, ours)
        if numbers[0] == numbers[1]:
            if not packed:
                self.bytes_of[numbers[1]] = self.bytes_of.get(numbers[1], 0.0) + size
            return
        differs = np.array([[here != there for here in ours] for there in theirs])
        matrix = differs * (size + self._bytes(var, theirs)[:, None] if packed else size)
        if numbers[0] > numbers[1]:
            numbers, matrix = numbers[::-1], matrix.T
        self.pairs[numbers] = self.pairs.get(numbers, 0.0) + matrix

    def add_here(self, owner: _Owner, choices: Sequence[int], size: int) -> None:
        """Add bytes that are alive under the owner's present choice only."""
        node, shardings = owner
        number = self.class_of[node]
        here = np.arange(len(shardings)) == choices[number]
        self.bytes_of[number] = self.bytes_of.get(number, 0.0) + here * float(size)

    def add_workspace(self, node: Node) -> None:
        """Add an operation's workspace under each of its strategies."""
        number, needs = (
            self.class_of[node.index],
            [workspace_bytes(node.rule, node.eqn, s, self.mesh) for s in node.strategies],
        )
        self.bytes_of[number] = self.bytes_of.get(number, 0.0) + np.array(needs, float)

    def _bytes(self, var: Var, shardings: Shardings) -> np.ndarray:
        return np.array([num_bytes(var) / sharding.num_shards(self.mesh) for sharding in shardings])


class _Owners:
    """Finds the owners of copies."""

    def __init__(self, graph: Graph, class_of: Sequence[int], choices: Sequence[int]):
        self.graph, self.class_of, self.choices = graph, class_of, choices
        self.readers: dict[tuple[Var, Phase], list[_Owner]] = {}
        hubs = set(graph.hubs.values())
        for edge in sorted(graph.edges, key=lambda edge: edge.target not in hubs):
            if graph.nodes[edge.target].kind != "keep":
                self.readers.setdefault((edge.var, edge.phase), []).append((edge.target, edge.wanted))
        self.reads_of: dict[Body, dict[Var, list[tuple[int, Phase]]]] = {}

    def of(self, alive: Alive) -> _Owned:
        """The owner of a live copy."""
        var, sharding = alive.copy
        phases = "".join(phase for at, phase in self._reads(alive.body).get(var, ()) if at >= alive.position)
        for among in (phases, "fbuo"):
            found = self.find(var, sharding, among)
            if found.owner is not None:
                return found
        for instruction in alive.body.instructions[max(0, alive.position) :]:
            for move in instruction.moves if isinstance(instruction, Move | Fused) else ():
                if (move.var, move.source) == alive.copy:
                    return self.of(alive._replace(copy=(var, move.target)))._replace(is_chosen=False)
        return found._replace(is_chosen=False)

    def find(self, var: Var, sharding: Sharding, phases: str) -> _Owned:
        """The first node that serves these phases and has chosen this sharding."""
        line = self._line(var, phases)
        for rank, (node, shardings) in enumerate(line):
            if shardings[self.choices[self.class_of[node]]] == sharding:
                return _Owned(rank, (node, shardings))
        return _Owned(len(line), None)

    def merges_with(self, var: Var, owner: _Owner) -> _Owner | None:
        """For a scatter that is added to a value, the other node that chooses its sharding: where both agree, it is done in
        place in the sum (`held.py`). None for all other values."""
        made = self.graph.produced.get(var)
        maker = None if made is None or var in held_values(self.graph) else self.graph.nodes[made.node]
        if maker is None or maker.kind != "op" or is_fused(maker):
            return None
        line = self._line(var, "fbuo")
        return next((other for other in line if other[0] != owner[0]), None)

    def _line(self, var: Var, phases: str) -> list[_Owner]:
        """The nodes that choose a sharding of a value for readers of these phases: maker, keeps, hubs, readers."""
        ordered = [phase for phase in PHASES if phase in phases]
        keeps = [keep for phase in ordered if (keep := self.graph.keeps.get((var, phase))) is not None]
        made = self.graph.produced.get(var)
        line: list[_Owner] = []
        if made is not None and len(keeps) < max(1, len(ordered)):
            line.append((made.node, made.shardings))
        line += [(keep.node, self.graph.nodes[keep.node].shardings) for keep in keeps]
        for phase in ordered:
            line += self.readers.get((var, phase), ())
        return line

    def _reads(self, body: Body) -> Mapping[Var, list[tuple[int, Phase]]]:
        """Value -> position and phase of each of its readers in a body."""
        if body not in self.reads_of:
            reads = self.reads_of[body] = {}
            for position, instruction in enumerate(body.instructions):
                if isinstance(instruction, Compute | Region):
                    phase = self.graph.phases.get(instruction.eqn, "f")
                    for var in inputs_of(instruction.eqn):
                        reads.setdefault(var, []).append((position, phase))
            for atom, _ in body.outputs:
                if isinstance(atom, Var):
                    reads.setdefault(atom, []).append((len(body.instructions), "o"))
        return self.reads_of[body]
