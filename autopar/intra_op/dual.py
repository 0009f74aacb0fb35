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
_DECODE_EVERY = 20
"""Rounds between attempts to read an assignment from the messages."""


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


class Ascent:
    """Messages of one problem, which get better from run to run. Edge k joins an earlier and a later node."""

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
        self.lower, self.upper = -np.inf, np.inf
        self.best: tuple[int, ...] = ()

    def run(self, rounds: int, upper: float = np.inf, gap: float = 1e-6) -> Bounds:
        """Pass messages forward and back.

        Args:
            rounds: So often at most.
            upper: Cost of the best assignment known from elsewhere.
            gap: Stop when the bounds are relatively so close.
        """
        self.upper = min(self.upper, upper)
        for number in range(rounds):
            self.forward()
            self.lower = max(self.lower, self.backward())
            if number % _DECODE_EVERY == 0:
                choices = self.improve(self.decode())
                cost = self.problem.cost(choices)
                if cost < self.upper or not self.best:
                    self.best = tuple(choices)
                    self.upper = min(self.upper, cost)
            if self.upper - self.lower <= gap * abs(self.upper):
                break
        return Bounds(self.lower, self.upper, self.best, tuple(self.excess()))

    def finite(self, values: np.ndarray) -> np.ndarray:
        return np.where(np.isfinite(values), values, self.forbidden).astype(np.float64)

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
