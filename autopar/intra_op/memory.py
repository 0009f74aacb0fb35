"""A memory row: the bytes alive at one moment, as a function of the choices.

In:     who is alive at the peak of a lowered program.
Out:    `MemoryRow` over the classes of nodes that decide how large these values are.
Method: a copy belongs to the port, hub or operation that chose its sharding; for every other choice of that node the
        row says how large its copy would be. Copies made on the way between two nodes are charged to the reader's side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autopar._jax import Var
from autopar.intra_op.graph import Graph, Shardings
from autopar.intra_op.liveness import Liveness
from autopar.intra_op.problem import MemoryRow, Problem
from autopar.ir.rules.rule import num_elements
from autopar.mesh import Sharding


def memory_row(
    graph: Graph, class_of: Sequence[int], problem: Problem, liveness: Liveness, choices: Sequence[int], budget: float
) -> MemoryRow:
    """The row that says: what is alive at this moment fits, whatever is chosen for it.

    Args:
        graph: Decisions.
        class_of: Class of each node.
        problem: The problem whose nodes are the classes.
        liveness: Of the program under `choices`.
        choices: Choice of each class.
        budget: Bytes.
    """
    owners = _owners(graph)
    bytes_of: dict[int, np.ndarray] = {}
    constant = 0.0
    for (var, sharding), size in liveness.alive:
        owner = _owner(owners.get(var, []), sharding, class_of, choices)
        if owner is None:
            constant += size
            continue
        node, shardings = owner
        whole = num_elements(var.aval.shape) * var.aval.dtype.itemsize
        vector = np.array([whole / s.num_shards(graph.mesh) for s in shardings])
        number = class_of[node]
        bytes_of[number] = bytes_of.get(number, 0.0) + vector
    return MemoryRow(f"instruction {liveness.moment}", bytes_of, budget, constant)


def _owners(graph: Graph) -> Mapping[Var, list[tuple[int, Shardings]]]:
    """For each value, the nodes that choose a sharding for it, its maker first."""
    owners: dict[Var, list[tuple[int, Shardings]]] = {v: [(p.node, p.shardings)] for v, p in graph.produced.items()}
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
    candidates: list[tuple[int, Shardings]], sharding: Sharding, class_of: Sequence[int], choices: Sequence[int]
) -> tuple[int, Shardings] | None:
    for node, shardings in candidates:
        if shardings[choices[class_of[node]]] == sharding:
            return node, shardings
    return None
