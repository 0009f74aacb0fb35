"""Solve a choice problem within a memory budget.

In:     `Problem`, and a function that names the memory rows an assignment breaks.
Out:    `Solution` for all nodes.
Method: rows by demand: an assignment is checked by the exact liveness of its program, and the moments that are over
        budget become rows. A small problem is solved again with them as cutting planes. In a large one the bytes at those
        moments get a price, and rows choose among what the prices found
        (Everett, "Generalized Lagrange multiplier method", Operations Research 1963).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.intra_op.problem import PROVED, MemoryRow, Problem, Solution, num_pairs
from autopar.intra_op.solve import solve
from autopar.intra_op.time_limit import TimeLimit, time_limit
from autopar.tuning import TUNING


@dataclass(slots=True)
class Prices:
    """What is learnt of prices in one problem, for the next of the same program whose costs are a little different.

    Attributes:
        fitting: The least price on a byte, in seconds, at which all fitted; 0: none is known.
    """

    fitting: float = 0.0


Solve = Callable[..., Solution]
"""How one problem without rows is solved: of the arguments of `solve`, up to `known`."""


def solve_constrained(
    problem: Problem,
    broken_rows: Callable[[Sequence[int]], list[MemoryRow]],
    solver: str = "highs",
    seconds: float | TimeLimit = 60.0,
    known: float = np.inf,
    gap: float = PROVED,
    is_hopeless: Callable[[], bool] = lambda: False,
    solve_one: Solve = solve,
    prices: Prices | None = None,
) -> Solution:
    """Least assignment for which `broken_rows(choices)` is empty, adding the rows it names until it is.

    Args:
        problem: Costs; the rows found are added.
        broken_rows: What an assignment breaks.
        solver: As of `solve`.
        seconds: As of `solve`.
        known: As of `solve`.
        gap: As of `solve`.
        is_hopeless: Asked when something is broken: whether it is proved that nothing will do.
        solve_one: Solves problems without rows.
        prices: Known from problems before; extended.

    Returns:
        The assignment; `"infeasible"` where none was found.
    """
    limit = time_limit(seconds)
    base = solve_one(problem, solver, limit, gap, known)
    if base.status in ("infeasible", "pruned"):
        return base
    rows = broken_rows(base.choices)
    if not rows:
        return base
    problem.rows.extend(rows)
    search = _Search(problem, base, broken_rows, solver, limit, solve_one)
    unlikely = least_share(problem) > 1.0
    if is_hopeless() or is_far_over(problem) or (unlikely and not search.fits_somehow()):
        return dataclasses.replace(base, choices=(), status="infeasible")
    if num_pairs(problem) <= TUNING.rows_core:
        exact = search.cut(gap)
        if exact.status != "infeasible":
            return exact
    # A row says what is alive at its moment in one program; of another it may say too much.
    return search.by_price(max(gap, TUNING.large_gap), known, prices or Prices())


def least_share(problem: Problem) -> float:
    """The part of the budget that a problem's rows say is needed, whatever is chosen: more than 1 is unlikely to fit."""
    return max((row.least(problem.costs) / row.budget_bytes for row in problem.rows), default=0.0)


def is_far_over(problem: Problem) -> bool:
    """Whether a large problem's rows need so much that no time is spent on what fits in spite of them."""
    return num_pairs(problem) > TUNING.rows_core and least_share(problem) > TUNING.far_over


@dataclass(frozen=True, slots=True, eq=False)
class _Search:
    """A problem whose best answer does not fit.

    Attributes:
        problem: It, with the rows that are known.
        base: Its best answer without any.
        broken_rows: What an assignment breaks.
        solver: As of `solve`.
        limit: As of `solve`.
        solve_one: Solves problems without rows.
    """

    problem: Problem
    base: Solution
    broken_rows: Callable[[Sequence[int]], list[MemoryRow]]
    solver: str
    limit: TimeLimit
    solve_one: Solve

    def fits_somehow(self) -> bool:
        """Whether anything is found that fits where the rows say that nothing does: bytes cost more than all seconds."""
        problem, base = self.problem, self.base
        for _ in range(TUNING.price_tries):
            over = max(row.used(base.choices) - row.budget_bytes for row in problem.rows)
            price = TUNING.dear_bytes * base.objective / max(over, 1.0)
            answer = self.solve_one(problem.priced(problem.rows, price), self.solver, self.limit, 1e-2)
            broken = self.broken_rows(answer.choices)
            if not broken:
                return True
            problem.rows.extend(broken)
        return False

    def cut(self, gap: float) -> Solution:
        """Solve and add the rows that are broken, again and again, until none is."""
        for _ in range(TUNING.cutting_planes):
            solution = solve(self.problem, self.solver, self.limit, gap)
            rows = self.broken_rows(solution.choices) if solution.choices else []
            if not rows:
                return solution
            self.problem.rows.extend(rows)
        return dataclasses.replace(solution, status="infeasible", choices=())

    def by_price(self, gap: float, known: float, prices: Prices) -> Solution:
        """Keep memory by a price on bytes instead of by rows: every problem is then one without rows, which solves fast.

        The price is raised until everything fits, or lowered until it does not. What a priced problem proves, less what
        the budget is worth at that price, bounds the least assignment from below: where that is no better than `known`,
        the search ends. One price for all gives layers that are alike the same choices, where the budget may have room
        for some of them: so at the end rows choose among what was found.
        """
        problem, base = self.problem, self.base
        best: Solution | None = None
        rows, answers, lower = list(problem.rows), [base], base.bound
        over = max(row.used(base.choices) - row.budget_bytes for row in rows)
        # Just too low, where a price is known.
        price = prices.fitting / TUNING.price_step or 0.01 * base.objective / max(over, 1.0)
        low = high = 0.0
        # Rows choose in the end among what the prices found: where a small gap may be left, a rough answer to each will do.
        rough = max(gap, TUNING.rough_gap) if gap > TUNING.large_gap else gap
        for _ in range(TUNING.prices):
            answer = self.solve_one(problem.priced(rows, price), self.solver, self.limit, rough)
            answers.append(answer)
            lower = max(lower, answer.bound - price * sum(row.budget_bytes - row.constant_bytes for row in rows))
            if lower >= known * (1 - PROVED):
                return dataclasses.replace(base, bound=lower, status="pruned")
            broken = self.broken_rows(answer.choices)
            if broken:
                rows += [
                    row for row in broken if all(known.used(answer.choices) <= known.budget_bytes for known in rows)
                ]
                low = price
            else:
                objective = problem.cost(answer.choices)
                if best is None or objective < best.objective:
                    best = Solution(answer.choices, objective, 0.0, "feasible", f"{answer.solver}, a price on memory")
                high = prices.fitting = price
            # Where saving the bytes is worth many steps already, and nothing more is saved, no price will help.
            if (high and low) or (price * over > 10 * base.objective and answer.choices == answers[-2].choices):
                break
            price = high / TUNING.price_step if high else TUNING.price_step * price
        mixed = self.mix(rows, answers, gap)
        if mixed is not None and (best is None or mixed.objective < best.objective):
            best = mixed
        if best is None:
            problem.rows[:] = rows
            return dataclasses.replace(base, choices=(), status="infeasible")
        return dataclasses.replace(best, bound=min(lower, best.objective))

    def mix(self, rows: Sequence[MemoryRow], answers: Sequence[Solution], gap: float) -> Solution | None:
        """The least assignment under the rows themselves that takes each node's choice from one of `answers`."""
        costs = []
        for node, cost in enumerate(self.problem.costs):
            mask = np.zeros(len(cost), bool)
            mask[[answer.choices[node] for answer in answers]] = True
            costs.append(np.where(mask, cost, np.inf))
        share = 1.0
        for attempt in range(2 * TUNING.price_mixes):
            aimed = [dataclasses.replace(row, budget_bytes=share * row.budget_bytes) for row in rows]
            answer = solve(Problem(costs, self.problem.edges, aimed), self.solver, self.limit, gap)
            broken = self.broken_rows(answer.choices) if answer.choices else []
            if not broken:
                mixed = f"{answer.solver}, what prices on memory found"
                return dataclasses.replace(answer, status="feasible", solver=mixed) if answer.choices else None
            if attempt + 1 >= TUNING.price_mixes:
                # The fullest moment is another one each time: aiming lower ends it.
                share *= min(row.budget_bytes / row.used(answer.choices) for row in broken)
            rows = [*rows, *broken]
        return None
