"""Bounds for a choice problem: from below by message passing, from above by what the messages suggest.

In:     `Problem` without memory rows, usually what `elimination.py` left.
Out:    `Bounds`: a number that no assignment beats, the best assignment seen, and what each choice costs beyond the bound.
Method: sequential tree-reweighted message passing (Kolmogorov, "Convergent tree-reweighted message passing for energy
        minimization", PAMI 2006): a block-coordinate ascent on the dual of the linear program that `ilp.py` relaxes to.
        Messages rewrite the costs without changing any assignment's total, so that the least entry of every table adds
        up to a lower bound, and how far a choice's entries exceed the least ones says how promising it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.intra_op.problem import Problem

_FORBIDDEN = 1e3
"""Stands for infinity, in units of the problem's scale: messages must stay finite."""
_PATIENCE = 4
"""Stop after so many rounds of passes that raised the bound by less than a thousandth of the gap."""


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """What is known about the least assignment.

    Attributes:
        lower: No assignment costs less.
        upper: Cost of `choices`.
        choices: The best assignment seen; () if none.
        excess: For each node and choice, seconds by which every assignment with that choice costs more than `lower`,
            at least. A choice whose excess is more than `upper - lower` is in no better assignment.
    """

    lower: float
    upper: float
    choices: tuple[int, ...]
    excess: tuple[np.ndarray, ...]


def bound(problem: Problem, rounds: int = 60, upper: float = float("inf"), gap: float = 1e-6) -> Bounds:
    """Bound the least assignment of `problem`.

    Args:
        problem: Node and edge costs; memory rows are not looked at.
        rounds: Forward and backward passes at most.
        upper: Cost of an assignment known from elsewhere.
        gap: Stop when the bounds are relatively so close.
    """
    return _Passes(problem).run(rounds, upper, gap)


class _Passes:
    """Messages of one problem. Edge k runs from the earlier node `first[k]` to the later `second[k]`."""

    def __init__(self, problem: Problem):
        self.problem = problem
        finite = [c[np.isfinite(c)] for c in problem.costs] + [m[np.isfinite(m)] for m in problem.edges.values()]
        self.forbidden = _FORBIDDEN * max(float(np.concatenate([f.ravel() for f in finite]).max(initial=0.0)), 1e-30)
        self.costs = [self.finite(c) for c in problem.costs]
        self.ends = list(problem.edges)
        self.tables = [self.finite(m) for m in problem.edges.values()]
        self.down = [np.zeros(t.shape[1]) for t in self.tables]  # to the later node
        self.up = [np.zeros(t.shape[0]) for t in self.tables]  # to the earlier node
        count = len(self.costs)
        self.later: list[list[int]] = [[] for _ in range(count)]  # edges to later nodes
        self.earlier: list[list[int]] = [[] for _ in range(count)]
        for k, (u, v) in enumerate(self.ends):
            self.later[u].append(k)
            self.earlier[v].append(k)
        self.share = [1.0 / max(len(a), len(b), 1) for a, b in zip(self.later, self.earlier, strict=True)]

    def finite(self, values: np.ndarray) -> np.ndarray:
        return np.where(np.isfinite(values), values, self.forbidden).astype(np.float64)

    def run(self, rounds: int, upper: float, gap: float) -> Bounds:
        best: tuple[int, ...] = ()
        lower, idle = -np.inf, 0
        for number in range(rounds):
            self.forward()
            raised = self.backward()
            if number % 4 == 3 or number < 2:
                choices = self.improve(self.decode())
                cost = self.problem.cost(choices)
                if cost < upper or (cost == upper and not best):
                    best, upper = tuple(choices), cost
            distance = upper - raised
            idle = idle + 1 if raised - lower <= 1e-3 * max(distance, 0.0) else 0
            lower = max(lower, raised)
            if distance <= gap * abs(upper) or idle >= _PATIENCE:
                break
        return Bounds(lower, upper, best, tuple(self.excess()))

    def unary(self, node: int) -> np.ndarray:
        """A node's costs with all messages to it."""
        total = self.costs[node].copy()
        for k in self.earlier[node]:
            total += self.down[k]
        for k in self.later[node]:
            total += self.up[k]
        return total

    def forward(self) -> None:
        for node in range(len(self.costs)):
            if not self.later[node]:
                continue
            part = self.unary(node) * self.share[node]
            for k in self.later[node]:
                message = (self.tables[k] + (part - self.up[k])[:, None]).min(axis=0)
                self.down[k] = message - message.min()

    def backward(self) -> float:
        """One pass towards the first node; the lower bound after it."""
        lower = 0.0
        for node in reversed(range(len(self.costs))):
            total = self.unary(node)
            least = total.min()
            lower += least
            part = (total - least) * self.share[node]
            for k in self.earlier[node]:
                message = (self.tables[k] + (part - self.down[k])[None, :]).min(axis=1)
                least = message.min()
                lower += least
                self.up[k] = message - least
        return float(lower)

    def decode(self) -> list[int]:
        """Node by node the best choice, given the earlier ones' choices and the later ones' messages."""
        choices: list[int] = []
        for node in range(len(self.costs)):
            total = self.costs[node].copy()
            for k in self.earlier[node]:
                total += self.tables[k][choices[self.ends[k][0]]]
            for k in self.later[node]:
                total += self.up[k]
            choices.append(int(total.argmin()))
        return choices

    def improve(self, choices: list[int], sweeps: int = 20) -> list[int]:
        """Change single choices while that helps."""
        for _ in range(sweeps):
            changed = False
            for node in range(len(self.costs)):
                total = self.costs[node].copy()
                for k in self.earlier[node]:
                    total += self.tables[k][choices[self.ends[k][0]]]
                for k in self.later[node]:
                    total += self.tables[k][:, choices[self.ends[k][1]]]
                best = int(total.argmin())
                if total[best] < total[choices[node]] * (1 - 1e-12):
                    choices[node], changed = best, True
            if not changed:
                break
        return choices

    def excess(self) -> Sequence[np.ndarray]:
        """What each choice costs beyond the lower bound.

        Each node's costs are handed to the edges towards earlier nodes, as the backward pass does; then every table's
        least entry is part of the bound, and what a choice costs beyond those entries is added to it.
        """
        totals = [self.unary(node) for node in range(len(self.costs))]
        own = [t * (1.0 - self.share[n] * len(self.earlier[n])) for n, t in enumerate(totals)]
        excess = [costs - costs.min() for costs in own]
        for k, (u, v) in enumerate(self.ends):
            table = self.tables[k] - self.up[k][:, None] + (totals[v] * self.share[v] - self.down[k])[None, :]
            least = table.min()
            excess[u] = excess[u] + (table.min(axis=1) - least)
            excess[v] = excess[v] + (table.min(axis=0) - least)
        return excess
