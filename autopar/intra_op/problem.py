"""The choice problem: pick one choice per node so that node costs plus edge costs are least, within memory.

In:     cost vectors, one per node; cost matrices, one per pair of nodes; memory rows.
Out:    `Problem`, plain arrays that tests build by hand; `Solution`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class MemoryRow:
    """At one moment of the program: sum over nodes of `bytes_of[node][choice]` <= `budget_bytes`."""

    label: str
    bytes_of: Mapping[int, np.ndarray]
    budget_bytes: float
    constant_bytes: float = 0.0

    def used(self, choices: Sequence[int]) -> float:
        """Bytes in use at this moment under `choices`."""
        return self.constant_bytes + float(sum(b[choices[n]] for n, b in self.bytes_of.items()))


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

    def cost(self, choices: Sequence[int]) -> float:
        """Total cost of one assignment."""
        nodes = sum(float(c[k]) for c, k in zip(self.costs, choices, strict=True))
        return nodes + sum(float(m[choices[u], choices[v]]) for (u, v), m in self.edges.items())

    def fits(self, choices: Sequence[int]) -> bool:
        """Whether one assignment keeps every memory row."""
        return all(row.used(choices) <= row.budget_bytes for row in self.rows)


@dataclass(frozen=True, slots=True)
class Solution:
    """An assignment and what is known about it.

    Attributes:
        choices: One choice per node.
        objective: Its cost in seconds.
        bound: No assignment costs less than this.
        status: `"optimal"`, `"feasible"` (the time limit came first) or `"infeasible"`.
        solver: Which solver, and on what was left for it.
    """

    choices: tuple[int, ...]
    objective: float
    bound: float
    status: str
    solver: str

    @property
    def gap(self) -> float:
        """(objective - bound) / objective; 0 where the assignment is proved least."""
        if self.objective <= 0 or self.objective == float("inf"):
            return 0.0 if self.status == "optimal" else float("inf")
        return max(0.0, (self.objective - self.bound) / self.objective)


def brute_force(problem: Problem) -> Solution:
    """The least assignment by trying all: the oracle of the tests."""
    best, best_cost = None, float("inf")
    for choices in itertools.product(*(range(len(c)) for c in problem.costs)):
        cost = problem.cost(choices)
        if cost < best_cost and problem.fits(choices):
            best, best_cost = choices, cost
    if best is None:
        return Solution((), float("inf"), float("inf"), "infeasible", "brute force")
    return Solution(best, best_cost, best_cost, "optimal", "brute force")
