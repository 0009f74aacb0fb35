"""Bounds a choice problem by message passing, and ranks its choices.

In:     `Problem` without memory rows, usually the core that `elimination.py` leaves.
Out:    `Ascent`: a lower bound, an assignment read from the messages, and the excess of each choice,
        the least that it costs beyond the bound.
Method: sequential tree-reweighted message passing (Kolmogorov, "Convergent tree-reweighted message passing for energy
        minimization", PAMI 2006): block-coordinate ascent on the dual of the linear relaxation in `ilp.py`. Messages
        reparametrize the costs without changing any assignment's total, so that the sum of the minima of all tables is a
        lower bound, and the amount by which a choice's entries exceed the minima says how promising the choice is.
        A round begins beyond the last messages by a part of their last change, until the bound falls (Nesterov's
        acceleration with restarts: O'Donoghue and Candes, "Adaptive restart for accelerated gradient schemes", FoCM 2015):
        on long ladders of layers a tenth of the rounds gives the same bound.
        Nodes of one level (length of the longest path from a node without earlier neighbours) have no edges between them,
        so that a level is processed at once, its tables side by side (`batches.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np

from autopar.intra_op.batches import Layout
from autopar.intra_op.problem import PROVED, Problem, num_pairs
from autopar.tuning import TUNING

_FORBIDDEN = 1e3
"""Replaces infinity, in units of the largest cost: messages must stay finite."""


class Ascent:
    """The messages of one problem, which improve from run to run.

    Attributes:
        lower: Lower bound on the cost of all assignments.
        upper: Cost of the incumbent.
        best: The incumbent; () if none.
    """

    def __init__(self, problem: Problem):
        self.problem, self._pairs = problem, num_pairs(problem)
        distinct = {id(values): values for values in (*problem.costs, *problem.edges.values())}.values()
        largest = max((float(v.max(initial=0.0, where=np.isfinite(v))) for v in distinct), default=0.0)
        self.layout = Layout(problem, _FORBIDDEN * max(largest, 1e-30))
        self.messages = self._before = np.zeros(self.layout.num_messages)
        self._pace = 0
        self.lower, self.upper = -np.inf, np.inf
        self.best: tuple[int, ...] = ()
        self._excess: tuple[np.ndarray, ...] | None = None

    def run(self, rounds: int, gap: float = PROVED, enough: float = np.inf, content: bool = False) -> Self:
        """Pass messages forward and back, and read assignments from them; returns the ascent itself.

        Ends once the bound stands still, and the same assignment is read that was read in half as many rounds, and costs as
        much as the bound: of assignments of equal cost, more rounds then seldom show another.

        Args:
            rounds: Number of rounds, at most.
            gap: Stop at this relative gap.
            enough: Stop when the lower bound is at least this, and read no assignment then.
            content: Read no assignment where the incumbent is within the gap.
        """
        before, self._excess = self.lower, None
        due, seen = 1, tuple[int, ...]()
        look = TUNING.message_look if self._pairs <= TUNING.huge_core else TUNING.message_look // 2
        for number in range(1, rounds + 1):
            last = self.lower
            self._round()
            if self.lower >= min(enough, self._wanted(gap)):
                break
            if number >= due and self.lower - last <= PROVED * abs(self.lower):
                due, (choices, cost) = 2 * number, self._read()
                if choices == seen and cost - self.lower <= PROVED * abs(cost):
                    self.offer(choices, cost)
                    return self
                seen = choices
            if number % look == 0:
                missing = min(self.upper, 1.1 * abs(self.lower)) - self.lower
                if self.lower - before <= TUNING.message_stalled * min(missing, 0.01 * abs(self.lower)):
                    break
                before = self.lower
        if self.lower < enough and not (content and self.lower >= self._wanted(gap)):
            self.offer(*self._read())
        return self

    def _wanted(self, gap: float) -> float:
        """The lower bound at which the incumbent is within a relative gap."""
        return self.upper - gap * abs(self.upper) if self.best else np.inf

    def seconds(self, rounds: int) -> float:
        """Estimated seconds of so many rounds, from the number and size of the tables."""
        calls = sum(1 + len(level.out) for level in self.layout.levels)
        return rounds * (TUNING.message_call_seconds * calls + TUNING.message_pair_seconds * self._pairs)

    def offer(self, choices: Sequence[int], cost: float | None = None) -> None:
        """Make an assignment from elsewhere the incumbent, if it is better; its cost is taken if given."""
        cost = self.problem.cost(choices) if cost is None else cost
        if cost < self.upper or not self.best:
            self.best, self.upper = tuple(choices), min(self.upper, cost)

    def _read(self) -> tuple[tuple[int, ...], float]:
        """Read assignments: level by level, from either end, the best choices given those of the levels before and the
        messages from the levels after. Returns the better one, and its cost."""
        levels = self.layout.levels
        found: list[tuple[tuple[int, ...], float]] = []
        for forward in (True, False):
            choices = np.zeros(self.layout.num_nodes, np.int64)
            for level in levels if forward else reversed(levels):
                later = level.heard_later.sums(self.messages)
                told = later if forward else level.heard.sums(self.messages) - later
                level.choose(choices, level.costs + told, level.into if forward else level.out)
            found.append(self._swept(choices))
        return min(found, key=lambda read: read[1])

    def _swept(self, choices: np.ndarray) -> tuple[tuple[int, ...], float]:
        """An assignment after coordinate descent over single nodes, and its cost; `choices` are changed."""
        cost = self.problem.cost(self.layout.in_order(choices))
        for _ in range(TUNING.message_sweeps):
            before, last = choices.copy(), cost
            for level in self.layout.levels:
                level.choose(choices, level.costs.copy(), (*level.into, *level.out))
            if np.array_equal(choices, before):
                break
            cost = self.problem.cost(self.layout.in_order(choices))
            if not cost < last:
                break
        return self.layout.in_order(choices), cost

    def _round(self) -> None:
        """Forward and back; the messages stay those of the best bound."""
        known = self.messages
        self.messages = known + self._pace / (self._pace + 3) * (known - self._before)
        self._forward()
        lower = self._backward()
        if lower < self.lower and self._pace:
            self.messages, self._pace = known, 0
        else:
            self.lower, self._before, self._pace = max(self.lower, lower), known, self._pace + 1

    def _forward(self) -> None:
        for level in self.layout.levels:
            if level.out:
                part = level.shared(level.costs + level.heard.sums(self.messages))
                for batch in level.out:
                    batch.send(self.messages, part)

    def _backward(self) -> float:
        """Pass messages towards the first level; returns the lower bound."""
        lower = 0.0
        for level in reversed(self.layout.levels):
            total = level.costs + level.heard.sums(self.messages)
            least = np.minimum.reduceat(total, level.starts)
            lower += float(least.sum())
            part = level.shared(total - np.repeat(least, level.lengths))
            for batch in level.into:
                lower += batch.send_excess(self.messages, part)
        return lower

    @property
    def excess(self) -> tuple[np.ndarray, ...]:
        """Per node and choice, the least seconds by which assignments with that choice exceed `lower`: if it is more than
        `upper - lower`, the choice is in no better assignment."""
        if self._excess is None:
            self._excess = self._beyond_bound()
        return self._excess

    def _beyond_bound(self) -> tuple[np.ndarray, ...]:
        """Compute the excess from the present messages.

        Each node's costs are distributed to its edges to earlier nodes, as in the backward pass; then the minimum of every
        table is part of the bound, and a choice's excess is the sum of what its entries exceed these minima by.
        """
        parts = {}
        excess = np.zeros(self.layout.num_entries + 1)
        for level in self.layout.levels:
            total = level.costs + level.heard.sums(self.messages)
            parts[level.number] = level.shared(total)
            own = total - parts[level.number][:-1] * level.num_into
            excess[level.entries] += own - np.repeat(np.minimum.reduceat(own, level.starts), level.lengths)
        for level in self.layout.levels:
            for batch in level.into:
                batch.add_excess(excess, self.messages, parts[level.number])
        return self.layout.by_node(excess)
