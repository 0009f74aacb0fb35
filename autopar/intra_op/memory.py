"""A memory row: the bytes alive at one moment, as a function of the choices.

In:     who is alive at the fullest moments of a lowered program.
Out:    `MemoryRow` over the classes of nodes that decide how large these values are.
Method: a copy belongs to the node that chose its sharding: of those whose readers are still to come, the first; for every
        other choice of that node the row says how large its copy would be. A second copy of a value is there only where
        its owner wants another sharding than the owner of the first. What is there only on the way to another copy
        belongs to that one's owner, and to no other choice of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autopar._jax import Var
from autopar.intra_op.graph import PHASES, Graph, Node, Phase, Shardings
from autopar.intra_op.held import held_values
from autopar.intra_op.liveness import Alive, Liveness, fullest_moments, packed_bytes
from autopar.intra_op.problem import MemoryRow
from autopar.intra_op.sharded import (
    Body,
    Compute,
    Fused,
    Gate,
    Instruction,
    Move,
    Region,
    describe_moment,
)
from autopar.intra_op.traffic import is_fused
from autopar.intra_op.workspace import workspace_at, workspace_bytes
from autopar.ir.dataflow import inputs_of
from autopar.ir.work import num_bytes
from autopar.mesh import Sharding
from autopar.tuning import TUNING


def broken_memory_rows(
    graph: Graph,
    class_of: Sequence[int],
    choices: Sequence[int],
    body: Body,
    donated: Sequence[bool],
    budget: float,
) -> list[MemoryRow]:
    """Rows for the moments at which a lowered program is over budget; none where it fits.

    Args:
        graph: Decisions.
        class_of: Class of each node.
        choices: Choice of each class.
        body: The program under these choices.
        donated: For each input of the program, whether its memory may be reused.
        budget: Bytes.
    """
    moments = fullest_moments(body, graph.mesh, held_values(graph), donated, TUNING.memory_rows)
    return rows_of(graph, class_of, choices, moments, budget)


def rows_of(
    graph: Graph, class_of: Sequence[int], choices: Sequence[int], moments: Sequence[Liveness], budget: float
) -> list[MemoryRow]:
    """Rows for those of a program's moments that are over budget; arguments as of `broken_memory_rows`."""
    over = [moment for moment in moments if moment.peak_bytes > budget]
    if not over:
        return []
    owners = _Owners(graph, class_of, choices)
    return [_row(owners, moment, budget) for moment in over]


def _place(at: Instruction | None) -> str:
    """A moment of a program for people: what it computes then, or for whom it communicates."""
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
    """The row that says: what is alive at this moment fits, whatever is chosen for it."""
    row, mesh = _Row(owners.graph, owners.class_of), owners.graph.mesh
    found = [(owners.of(alive), alive) for alive in liveness.alive]
    first_of: dict[Var, _Owner] = {}
    # Makers come first, then who waits, then hubs, then readers, as in `_Owners`.
    for (_, owner, is_there), alive in sorted(found, key=lambda entry: entry[0][0]):
        var = alive.copy[0]
        if owner is None:
            row.constant += alive.num_bytes
        elif not is_there:
            row.add_here(owner, owners.choices, alive.num_bytes)
        elif (other := owners.merges_with(var, owner)) is not None:
            row.add(var, other, owner, alive.times)
        else:
            row.add(var, first_of.setdefault(var, owner), owner, alive.times)
    for move in liveness.packed:
        ends = [owners.who_wants(move.var, end, "fbuo")[1] for end in (move.source, move.target)]
        if ends[0] is None or ends[1] is None:
            row.constant += packed_bytes(move, mesh)
        else:
            row.add(move.var, ends[0], ends[1], packed=True)
    if isinstance(liveness.at, Compute) and workspace_at(liveness.at, mesh):
        row.add_workspace(owners.graph.nodes[owners.graph.op_node[liveness.at.eqn]])
    return MemoryRow(_place(liveness.at), row.bytes_of, budget, row.constant, row.pairs)


_Owner = tuple[int, Shardings]
"""A node that chooses a sharding for a value, and the value's sharding for each of its choices."""


class _Row:
    """A memory row while it is being added up."""

    def __init__(self, graph: Graph, class_of: Sequence[int]):
        self.mesh, self.class_of = graph.mesh, class_of
        self.bytes_of: dict[int, np.ndarray] = {}
        self.pairs: dict[tuple[int, int], np.ndarray] = {}
        self.constant = 0.0

    def add(self, var: Var, first: _Owner, owner: _Owner, times: int = 1, packed: bool = False) -> None:
        """The owner's copy: its own node's where it is the first, else beside the first's and only where they differ.

        There are so many `times` of it. With `packed`, the copies of both are there once more where they differ.
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
        """What is there under the owner's present choice alone."""
        node, shardings = owner
        number = self.class_of[node]
        here = np.arange(len(shardings)) == choices[number]
        self.bytes_of[number] = self.bytes_of.get(number, 0.0) + here * float(size)

    def add_workspace(self, node: Node) -> None:
        """What an operation needs besides, under each of its strategies."""
        number, needs = (
            self.class_of[node.index],
            [workspace_bytes(node.rule, node.eqn, s, self.mesh) for s in node.strategies],
        )
        self.bytes_of[number] = self.bytes_of.get(number, 0.0) + np.array(needs, float)

    def _bytes(self, var: Var, shardings: Shardings) -> np.ndarray:
        return np.array([num_bytes(var) / sharding.num_shards(self.mesh) for sharding in shardings])


class _Owners:
    """Whose a copy is."""

    def __init__(self, graph: Graph, class_of: Sequence[int], choices: Sequence[int]):
        self.graph, self.class_of, self.choices = graph, class_of, choices
        self.readers: dict[tuple[Var, Phase], list[_Owner]] = {}
        hubs = set(graph.hubs.values())
        for edge in sorted(graph.edges, key=lambda edge: edge.target not in hubs):
            if graph.nodes[edge.target].kind != "keep":
                self.readers.setdefault((edge.var, edge.phase), []).append((edge.target, edge.wanted))
        self.reads_of: dict[Body, dict[Var, list[tuple[int, Phase]]]] = {}

    def of(self, alive: Alive) -> tuple[int, _Owner | None, bool]:
        """The place in line of a copy's owner, the owner, and whether the copy is there because of its choice."""
        var, sharding = alive.copy
        phases = "".join(phase for at, phase in self._reads(alive.body).get(var, ()) if at >= alive.position)
        for among in (phases, "fbuo"):
            rank, owner = self.who_wants(var, sharding, among)
            if owner is not None:
                return rank, owner, True
        for instruction in alive.body.instructions[max(0, alive.position) :]:
            for move in instruction.moves if isinstance(instruction, Fused) else (instruction,):
                if isinstance(move, Move) and (move.var, move.source) == alive.copy:
                    rank, owner, _ = self.of(alive._replace(copy=(var, move.target)))
                    return rank, owner, False
        return rank, None, False

    def who_wants(self, var: Var, sharding: Sharding, phases: str) -> tuple[int, _Owner | None]:
        """The first of those who serve these phases and choose this sharding, and the place in line."""
        line = self._line(var, phases)
        for rank, (node, shardings) in enumerate(line):
            if shardings[self.choices[self.class_of[node]]] == sharding:
                return rank, (node, shardings)
        return len(line), None

    def merges_with(self, var: Var, owner: _Owner) -> _Owner | None:
        """Of what is scattered to be added to a value, the other of those two who choose its sharding: where they agree it is
        part of the sum and no array of its own (`held.py`). None of everything else."""
        made = self.graph.produced.get(var)
        maker = None if made is None or var in held_values(self.graph) else self.graph.nodes[made.node]
        if maker is None or maker.kind != "op" or is_fused(maker):
            return None
        line = self._line(var, "fbuo")
        return next((other for other in line if other[0] != owner[0]), None)

    def _line(self, var: Var, phases: str) -> list[_Owner]:
        """Who chooses a sharding for a value that readers of these phases wait for."""
        there = [phase for phase in PHASES if phase in phases]
        waits = [keep for phase in there if (keep := self.graph.keeps.get((var, phase))) is not None]
        made = self.graph.produced.get(var)
        line: list[_Owner] = []
        if made is not None and len(waits) < max(1, len(there)):
            line.append((made.node, made.shardings))
        line += [(keep.node, self.graph.nodes[keep.node].shardings) for keep in waits]
        for phase in there:
            line += self.readers.get((var, phase), ())
        return line

    def _reads(self, body: Body) -> Mapping[Var, list[tuple[int, Phase]]]:
        """Where each value of a body is read by operations, and in which phase."""
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
