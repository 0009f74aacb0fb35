"""The choice problem: pick one choice per node to minimize node costs plus edge costs, within memory.

In:     cost vectors, one per node; cost matrices, one per pair of nodes; memory rows.
Out:    `Problem`, plain arrays that tests build by hand; `Solution`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from autopar.tuning import TUNING

PROVED = 1e-6
"""The largest relative gap that counts as none, and is called "optimal"."""


@dataclass(frozen=True, slots=True, eq=False)
class MemoryRow:
    """A constraint: the values alive at one moment of the program fit the budget.

    `constant_bytes` plus the sum over nodes of `bytes_of[node][choice]`, and over pairs u < v of
    `pairs[u, v][choice of u, choice of v]` (a second copy of a value, which exists only if two nodes want different
    shardings), is at most `budget_bytes`.
    """

    label: str
    bytes_of: Mapping[int, np.ndarray]
    budget_bytes: float
    constant_bytes: float = 0.0
    pairs: Mapping[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def used(self, choices: Sequence[int]) -> float:
        """Bytes in use at this moment under `choices`."""
        nodes = sum(float(b[choices[n]]) for n, b in self.bytes_of.items())
        return self.constant_bytes + nodes + sum(float(m[choices[u], choices[v]]) for (u, v), m in self.pairs.items())

    def least(self, costs: Sequence[np.ndarray]) -> float:
        """Lower bound on bytes in use at this moment: each node takes its smallest choice."""
        return self.constant_bytes + float(sum(b[np.isfinite(costs[n])].min() for n, b in self.bytes_of.items()))

    @property
    def nodes(self) -> tuple[int, ...]:
        """The nodes in this row, in order."""
        return tuple(sorted({*self.bytes_of, *itertools.chain.from_iterable(self.pairs)}))

    def narrowed(self, number_of: Mapping[int, int], alive_of: Callable[[int], np.ndarray]) -> MemoryRow:
        """The row for a problem with fewer choices and renumbered nodes, in the same order."""
        bytes_of = {number_of[n]: b[alive_of(n)] for n, b in self.bytes_of.items()}
        pairs = {
            (number_of[u], number_of[v]): matrix[np.ix_(alive_of(u), alive_of(v))]
            for (u, v), matrix in self.pairs.items()
        }
        return dataclasses.replace(self, bytes_of=bytes_of, pairs=pairs)


@dataclass(eq=False, slots=True)
class Problem:
    """Costs in seconds; `inf` forbids.

    Attributes:
        costs: Per node, its cost vector `[choice]`.
        edges: (u, v) with u < v -> cost matrix `[choice of u, choice of v]`.
        rows: Memory rows.
    """

    costs: list[np.ndarray] = field(default_factory=list)
    edges: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    rows: list[MemoryRow] = field(default_factory=list)

    def add_edge(self, u: int, v: int, matrix: np.ndarray) -> None:
        """Add `matrix[choice of u, choice of v]`; a node's edge to itself is a node cost."""
        if u == v:
            self.costs[u] = self.costs[u] + np.diagonal(matrix)
            return
        key, oriented = ((u, v), matrix) if u < v else ((v, u), matrix.T)
        known = self.edges.get(key)
        self.edges[key] = oriented if known is None else known + oriented

    def priced(self, rows: Sequence[MemoryRow], price: float) -> Problem:
        """The problem without rows, with each byte in `rows` priced at `price` seconds."""
        priced = Problem(list(self.costs), dict(self.edges))
        for row in rows:
            for node, num_bytes in row.bytes_of.items():
                priced.costs[node] = priced.costs[node] + price * num_bytes
            for (u, v), num_bytes in row.pairs.items():
                priced.add_edge(u, v, price * num_bytes)
        return priced

    def cost(self, choices: Sequence[int]) -> float:
        """Total cost of one assignment."""
        nodes = sum([cost.item(k) for cost, k in zip(self.costs, choices, strict=True)])
        return nodes + sum([table.item(choices[u], choices[v]) for (u, v), table in self.edges.items()])

    def fits(self, choices: Sequence[int]) -> bool:
        """Whether one assignment meets every memory row."""
        return all(row.used(choices) <= row.budget_bytes for row in self.rows)


class Neighbours:
    """A problem by nodes.

    Attributes:
        around: Per node, its neighbours, and the costs on the edge to each: `[own choice, neighbour's choice]`.
    """

    def __init__(self, problem: Problem):
        self.problem, self.costs = problem, [np.asarray(cost, dtype=float) for cost in problem.costs]
        self.around: list[list[tuple[int, np.ndarray]]] = [[] for _ in self.costs]
        for (u, v), matrix in problem.edges.items():
            self.around[u].append((v, matrix))
            self.around[v].append((u, matrix.T))

    @functools.cached_property
    def earlier(self) -> list[list[tuple[int, np.ndarray]]]:
        """As `around`, for neighbours before a node only."""
        return [[(v, m) for v, m in some if v < u] for u, some in enumerate(self.around)]

    def beside(self, node: int, choices: Sequence[int], earlier: bool = False) -> np.ndarray:
        """Cost of each choice of a node, given the choices of its neighbours, or of `earlier` neighbours only."""
        total = self.costs[node].copy()
        for other, matrix in self.earlier[node] if earlier else self.around[node]:
            total += matrix[:, choices[other]]
        return total

    def descend(self, choices: list[int], nodes: Sequence[int]) -> None:
        """Give each of the nodes its best choice in turn, until none changes (20 rounds at most)."""
        for _ in range(20):
            before = list(choices)
            for node in nodes:
                total = self.beside(node, choices)
                if total.min() < total[choices[node]]:
                    choices[node] = int(total.argmin())
            if choices == before:
                break


def num_pairs(problem: Problem) -> int:
    """The size of a problem: pairs of choices, over all edges."""
    return sum(matrix.size for matrix in problem.edges.values())


def planning_seconds(problem: Problem, axes: int = 1, of: int = 1) -> float:
    """Estimate the seconds of sharding a program from the size of its problem.

    Args:
        problem: The program's problem on a mesh of `of` axes.
        axes: Number of axes of the mesh to be planned; each multiplies the choices of a node.
        of: Number of axes of the problem's mesh.
    """
    pairs = sum(float(matrix.size) ** (axes / of) for matrix in problem.edges.values())
    return len(problem.costs) / TUNING.nodes_per_second + pairs / TUNING.pairs_per_second


Status = Literal["optimal", "feasible", "pruned", "infeasible"]


@dataclass(frozen=True, slots=True)
class Solution:
    """An assignment and what is known about it.

    Attributes:
        choices: One choice per node.
        objective: Its cost in seconds.
        bound: Lower bound on the cost of all assignments.
        status: `"optimal"` (its gap is at most `PROVED`), `"feasible"` (the search ended first), `"pruned"` (the search
            ended because no assignment beats the incumbent from elsewhere) or `"infeasible"`.
        solver: The solver, and what was left for it.
    """

    choices: tuple[int, ...]
    objective: float
    bound: float
    status: Status
    solver: str

    def bounded(self, bound: float) -> Solution:
        """The same assignment as a solution of a wider problem with this lower bound."""
        known = dataclasses.replace(self, bound=min(bound, self.objective), status="feasible")
        return dataclasses.replace(known, bound=self.objective, status="optimal") if known.gap <= PROVED else known

    @property
    def gap(self) -> float:
        """The relative gap, (objective - bound) / objective; 0 if proved optimal."""
        if self.objective <= 0 or self.objective == float("inf"):
            return 0.0 if self.status == "optimal" else float("inf")
        return max(0.0, (self.objective - self.bound) / self.objective)
