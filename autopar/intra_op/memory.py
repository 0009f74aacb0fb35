"""A memory row: the bytes alive at one moment, as a function of the choices.

In:     who is alive at the fullest moments of a lowered program.
Out:    `MemoryRow` over the classes of nodes that decide how large these values are.
Method: a copy belongs to the port, hub or operation that chose its sharding; for every other choice of that node the
        row says how large its copy would be. A second copy of a value is there only where its owner wants another
        sharding than the owner of the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from autopar._jax import JaxprEqn, Var
from autopar.intra_op.costs import held_values
from autopar.intra_op.graph import Graph, Shardings
from autopar.intra_op.liveness import Liveness, fullest_moments, packed_bytes
from autopar.intra_op.problem import MemoryRow
from autopar.intra_op.sharded import Body, Compute, Fused, Gate, Instruction, Move, Region, describe
from autopar.ir.region import bodies_of
from autopar.ir.rules.rule import num_elements
from autopar.ir.source import UNKNOWN, source_line
from autopar.mesh import Sharding

MAX_ROWS = 8
"""Moments of a program over budget that become rows at once."""


def broken_memory_rows(
    graph: Graph,
    class_of: Sequence[int],
    choices: Sequence[int],
    body: Body,
    donated: Sequence[bool],
    budget: float,
    elsewhere: AbstractSet[Var] = frozenset(),
) -> list[MemoryRow]:
    """Rows for the moments at which a lowered program is over budget; none where it fits.

    Args:
        graph: Decisions.
        class_of: Class of each node.
        choices: Choice of each class.
        body: The program under these choices.
        donated: For each input of the program, whether its memory may be reused.
        budget: Bytes.
        elsewhere: Values that take no memory here.
    """
    moments = fullest_moments(body, graph.mesh, held_values(graph), donated, MAX_ROWS, elsewhere)
    return [
        _row(graph, class_of, moment, choices, budget, _place(moment.at))
        for moment in moments
        if moment.peak_bytes > budget
    ]


def _place(at: Instruction | None) -> str:
    """A moment of a program for people: what it computes then, or for whom it communicates."""
    match at:
        case None:
            return "the start"
        case Compute() | Region():
            return _named(at.eqn)
        case Gate():
            return "a wait"
        case Move():
            return f"the {at.step} before {at.reader}"
        case Fused():
            return f"the {at.moves[0].step} of {len(at.moves)} arrays before {at.moves[0].reader}"


def _named(eqn: JaxprEqn) -> str:
    """An equation by its line; a loop of our own, which has none, by the first in it that has."""
    inner = [e for body in bodies_of(eqn) for e in body.eqns]
    known = [e for e in inner if source_line(e) != UNKNOWN]
    if source_line(eqn) != UNKNOWN or not known:
        return describe(eqn)
    return f"the loop over microbatches, which begins with {describe(known[0])},"


def _row(
    graph: Graph, class_of: Sequence[int], liveness: Liveness, choices: Sequence[int], budget: float, place: str
) -> MemoryRow:
    """The row that says: what is alive at this moment fits, whatever is chosen for it."""
    owners = _owners(graph)
    row = _Row(graph, class_of)
    copies = [
        (*copy, size, _owner(owners.get(copy[0], []), copy[1], class_of, choices)) for copy, size in liveness.alive
    ]
    first_of: dict[Var, _Owner] = {}
    # Makers come first, then hubs, then readers, as in `owners`.
    for var, _, size, (_, owner) in sorted(copies, key=lambda entry: entry[3][0]):
        if owner is None:
            row.constant += size
        else:
            row.add(var, first_of.setdefault(var, owner), owner)
    for move in liveness.packed:
        ends = [_owner(owners.get(move.var, []), end, class_of, choices)[1] for end in (move.source, move.target)]
        if ends[0] is None or ends[1] is None:
            row.constant += packed_bytes(move, graph.mesh)
        else:
            row.add(move.var, ends[0], ends[1], packed=True)
    return MemoryRow(place, row.bytes_of, budget, row.constant, row.pairs)


_Owner = tuple[int, Shardings]
"""A node that chooses a sharding for a value, and the value's sharding for each of its choices."""


class _Row:
    """A memory row while it is being added up."""

    def __init__(self, graph: Graph, class_of: Sequence[int]):
        self.mesh, self.class_of = graph.mesh, class_of
        self.bytes_of: dict[int, np.ndarray] = {}
        self.pairs: dict[tuple[int, int], np.ndarray] = {}
        self.constant = 0.0

    def add(self, var: Var, first: _Owner, owner: _Owner, packed: bool = False) -> None:
        """The owner's copy: its own node's where it is the first, else beside the first's and only where they differ.

        With `packed`, the copies of both are there once more where they differ.
        """
        (u, theirs), (v, ours) = first, owner
        numbers = self.class_of[u], self.class_of[v]
        size = self._bytes(var, ours)
        if numbers[0] == numbers[1]:
            if not packed:
                self.bytes_of[numbers[1]] = self.bytes_of.get(numbers[1], 0.0) + size
            return
        differs = np.array([[here != there for here in ours] for there in theirs])
        matrix = differs * (size + self._bytes(var, theirs)[:, None] if packed else size)
        if numbers[0] > numbers[1]:
            numbers, matrix = numbers[::-1], matrix.T
        self.pairs[numbers] = self.pairs.get(numbers, 0.0) + matrix

    def _bytes(self, var: Var, shardings: Shardings) -> np.ndarray:
        whole = num_elements(var.aval.shape) * var.aval.dtype.itemsize
        return np.array([whole / sharding.num_shards(self.mesh) for sharding in shardings])


def _owners(graph: Graph) -> Mapping[Var, list[_Owner]]:
    """For each value, the nodes that choose a sharding for it, its maker first."""
    owners: dict[Var, list[_Owner]] = {v: [(p.node, p.shardings)] for v, p in graph.produced.items()}
    for (var, _), hub in graph.hubs.items():
        owners[var].append((hub, graph.nodes[hub].shardings))
    for node in graph.nodes:
        if node.kind == "op":
            for k, atom in enumerate(node.eqn.invars):
                if isinstance(atom, Var):
                    owners[atom].append((node.index, tuple(s.operands[k] for s in node.strategies)))
    for node in graph.nodes:
        if node.kind == "port" and node.var is not None:
            owners[node.var].append((node.index, node.shardings))
    return owners


def _owner(
    candidates: list[_Owner], sharding: Sharding, class_of: Sequence[int], choices: Sequence[int]
) -> tuple[int, _Owner | None]:
    """The first who wants this sharding, and the place in line."""
    for rank, (node, shardings) in enumerate(candidates):
        if shardings[choices[class_of[node]]] == sharding:
            return rank, (node, shardings)
    return len(candidates), None
