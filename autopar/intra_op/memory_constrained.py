"""Solves a choice problem within a memory budget.

In:     `Problem`, and a function from an assignment to the memory rows that it violates.
Out:    `Solution` for all nodes.
Method: row generation: an assignment is checked by the exact liveness of its program, and peaks over budget become rows. The
        bytes at these peaks get a price, and in the end the rows choose among the priced answers (Everett, "Generalized
        Lagrange multiplier method", Operations Research 1963). Where that leaves enough to be won, or finds nothing, a small
        problem is solved again with the rows as cutting planes, and so is the next one of the same program; where many
        answers of one cost violate them, one that fits is looked for below their budgets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.intra_op.polish import exchange
from autopar.intra_op.problem import PROVED, MemoryRow, Problem, Solution, num_pairs
from autopar.intra_op.solve import Solve, solve
from autopar.intra_op.time_limit import TimeLimit, time_limit
from autopar.tuning import TUNING


@dataclass(slots=True)
class Learnt:
    """What a problem teaches about memory, for the next problem of the same program with slightly different costs.

    Attributes:
        price: The least price per byte, in seconds, at which an answer fitted; 0: none is known.
        rows: Those of the last problem that was solved within rows.
    """

    price: float = 0.0
    rows: list[MemoryRow] = field(default_factory=list)


def solve_constrained(
    problem: Problem,
    broken_rows: Callable[[Sequence[int]], list[MemoryRow]],
    solver: str = "highs",
    seconds: float | TimeLimit = 60.0,
    known: float = np.inf,
    gap: float = PROVED,
    is_hopeless: Callable[[], bool] = lambda: False,
    may_send_less: Callable[[], bool] = lambda: False,
    solve_one: Solve = solve,
    learnt: Learnt | None = None,
    num_planes: int = TUNING.cutting_planes,
    free: Solution | None = None,
) -> Solution:
    """Least assignment that violates no row, generating rows with `broken_rows` as needed.

    Args:
        problem: Costs; the rows found are added.
        broken_rows: The rows that an assignment violates.
        solver: As in `solve`.
        seconds: As in `solve`.
        known: As in `solve`.
        gap: As in `solve`.
        is_hopeless: Whether it is proved that nothing fits; called once a row is violated.
        may_send_less: Whether smaller messages may be why something fits: then what no price makes fit is not sought longer.
        solve_one: Solves problems without rows.
        learnt: What earlier problems taught; updated.
        num_planes: How often a small problem is solved with rows as cutting planes.
        free: The least assignment without rows; None: it is solved for.

    Returns:
        The assignment; status `"infeasible"` if none was found.
    """
    limit = time_limit(seconds)
    base = free or solve_one(problem, solver, limit, gap, known)
    if base.status in ("infeasible", "pruned"):
        return base
    rows = broken_rows(base.choices)
    if not rows:
        return base
    problem.rows.extend(rows)
    search = _Search(problem, base, broken_rows, solver, limit, solve_one, known, learnt or Learnt(), may_send_less)
    unlikely = least_share(problem) > 1.0
    if is_hopeless() or is_far_over(problem) or (unlikely and not search.fits_somehow()):
        return dataclasses.replace(base, choices=(), status="infeasible")
    # Rows describe the program that they were read from, and may overestimate another: infeasible rows prove nothing.
    priced = search.by_price(max(gap, TUNING.large_gap))
    is_small = num_pairs(problem) <= TUNING.rows_core and not limit.is_spent
    return search.cut_below(priced, gap, num_planes) if is_small and priced.status != "pruned" else priced


def least_share(problem: Problem) -> float:
    """Fraction of the budget that every assignment needs by the problem's rows; above 1, it is unlikely that any fits."""
    return max((row.least(problem.costs) / row.budget_bytes for row in problem.rows), default=0.0)


def is_far_over(problem: Problem) -> bool:
    """Whether the rows of a large problem need so much more than the budget that searching is not worth the time."""
    return num_pairs(problem) > TUNING.rows_core and least_share(problem) > TUNING.far_over


@dataclass(frozen=True, slots=True, eq=False)
class _Search:
    """A problem whose best answer without rows does not fit.

    Attributes:
        problem: The problem, with the rows known so far.
        base: Its best answer without rows.
        broken_rows: The rows that an assignment violates.
        solver: As in `solve`.
        limit: The shared time limit.
        solve_one: Solves problems without rows.
        known: As in `solve`.
        learnt: What earlier problems taught; updated.
        may_send_less: As in `solve_constrained`.
    """

    problem: Problem
    base: Solution
    broken_rows: Callable[[Sequence[int]], list[MemoryRow]]
    solver: str
    limit: TimeLimit
    solve_one: Solve
    known: float
    learnt: Learnt
    may_send_less: Callable[[], bool]

    def fits_somehow(self) -> bool:
        """Whether an answer that fits is found by pricing bytes above all seconds, though the rows say that none fits."""
        problem, base = self.problem, self.base
        for _ in range(TUNING.price_tries):
            over = max(row.used(base.choices) - row.budget_bytes for row in problem.rows)
            price = TUNING.dear_bytes * base.objective / max(over, 1.0)
            answer = self.solve_one(problem.priced(problem.rows, price), self.solver, self.limit, 1e-2)
            broken = self.broken_rows(answer.choices)
            if not broken:
                return True
            if self.limit.is_over:
                break
            problem.rows.extend(broken)
        return False

    @property
    def cut_seconds(self) -> float:
        """Seconds that a solve with the rows takes, roughly."""
        return _solve_seconds(num_pairs(self.problem), self.problem.rows)

    def allowed(self, gap: float) -> float:
        """The gap at which solves with rows may stop: `gap`, or a rough one where the difference repays no solve."""
        won = TUNING.rough_gap * self.base.objective
        return gap if self.cut_seconds <= self.limit.worth(won) else max(gap, TUNING.rough_gap)

    def cut_below(self, priced: Solution, gap: float, num_planes: int) -> Solution:
        """The better of an answer at a price on bytes, if there is one, and of one by cutting planes, if that may repay."""
        known = min(self.known, priced.objective) if priced.choices else self.known
        room, takes = known - priced.bound, TUNING.less_planes * self.cut_seconds
        if (priced.choices and room <= gap * known) or not self.limit.repays(TUNING.hoped * room, takes):
            return priced
        if not self.limit.repays(TUNING.rough_gap * self.base.objective, takes):
            gap, num_planes = max(gap, TUNING.rough_gap), min(num_planes, TUNING.less_planes)
        with self.limit.half():
            exact = dataclasses.replace(self, known=known).cut(gap, num_planes)
        is_beaten = exact.status == "pruned" and exact.bound >= self.known * (1 - PROVED)
        is_better = exact.status in ("optimal", "feasible") and exact.objective < priced.objective
        if not priced.choices or is_beaten or is_better:
            return exact
        return priced if exact.status == "infeasible" else priced.bounded(max(priced.bound, exact.bound))

    def cut(self, gap: float, num_planes: int) -> Solution:
        """Solve with rows as cutting planes, until none is violated, or none of the answers can beat `known`.

        Begins with the rows of the problem before, without which most of them would be found once more, one solve each. Where
        rows that an answer violates did not make the next one dearer, there are many such answers, which cost the same: then
        one that fits is looked for below the budgets of the rows, and taken if what it costs above the bound is allowed, or
        less than further solves repay. When its time is spent, it ends with the best that fits, if any.
        """
        problem, own = self.problem, list(self.problem.rows)
        problem.rows.extend(self.learnt.rows)
        fitting: Solution | None = None
        before, share = -np.inf, 0.0
        for _ in range(num_planes):
            solution = solve(problem, self.solver, self.limit, gap)
            solution = solution.bounded(max(solution.bound, self.base.bound)) if solution.choices else solution
            if not solution.choices:
                if not self.learnt.rows or self.limit.is_spent:
                    return solution
                problem.rows[:], self.learnt.rows = own, []  # they may overestimate what is alive now
                continue
            is_beaten = solution.bound >= self.known * (1 - PROVED)
            rows = [] if is_beaten else self.broken_rows(solution.choices)
            if not rows:
                self.learnt.rows = list(problem.rows)
                return dataclasses.replace(solution, status="pruned") if is_beaten else solution
            problem.rows.extend(rows)
            own += rows
            if solution.objective <= before * (1 + PROVED):
                share = share or min(row.budget_bytes / row.used(solution.choices) for row in rows)
                aimed, rows = self.aim(problem.costs, problem.rows, share, gap)
                problem.rows.extend(rows)
                own += rows
                if rows:
                    share *= min(row.budget_bytes / row.used(aimed.choices) for row in rows)
                elif not aimed.choices:
                    share = (1 + share) / 2
                elif fitting is None or aimed.objective < fitting.objective:
                    fitting = aimed
            before = solution.objective
            if fitting is not None and self.is_enough(fitting.objective - solution.bound, gap * fitting.objective):
                self.learnt.rows = list(problem.rows)
                return dataclasses.replace(fitting, status="feasible").bounded(solution.bound)
            if self.limit.is_spent:
                break
        if fitting is not None:
            return dataclasses.replace(fitting, status="feasible").bounded(solution.bound)
        return dataclasses.replace(solution, status="infeasible", choices=())

    def is_enough(self, room: float, allowed: float) -> bool:
        """Whether an answer may stay so many seconds above the bound: they are allowed, or repay no further solve."""
        return room <= allowed or not self.limit.repays(room, self.cut_seconds)

    def aim(
        self, costs: list[np.ndarray], rows: Sequence[MemoryRow], share: float, gap: float
    ) -> tuple[Solution, list[MemoryRow]]:
        """The least assignment within a share of the rows' budgets, and the rows that it violates."""
        answer = solve(Problem(costs, self.problem.edges, _shares(rows, share)), self.solver, self.limit, gap)
        return answer, self.broken_rows(answer.choices) if answer.choices else []

    def by_price(self, gap: float) -> Solution:
        """Meet the budget with a price on bytes (a Lagrange multiplier) instead of rows, so that problems solve fast.

        The price is raised until the answer fits, or lowered until it does not. The bound of a priced problem, less the
        price of the budget, is a dual bound of the constrained one: the search ends if it is no better than `known`. One
        price gives equal layers equal choices, where the budget may have room for dearer bytes in some of them: so in the
        end the rows choose among the answers found.
        """
        problem, base, learnt = self.problem, self.base, self.learnt
        best: Solution | None = None
        rows, answers, lower = list(problem.rows), [base], base.bound
        over = max(row.used(base.choices) - row.budget_bytes for row in rows)
        # If a fitting price is known, begin one step below it.
        price = learnt.price / TUNING.price_step or 0.01 * base.objective / max(over, 1.0)
        low = high = 0.0
        # Rows choose among the answers in the end: if a small gap is allowed, rough answers will do.
        rough = max(gap, TUNING.rough_gap) if gap > TUNING.large_gap else gap
        for _ in range(TUNING.prices):
            answer = self.solve_one(problem.priced(rows, price), self.solver, self.limit, rough)
            answers.append(answer)
            lower = max(lower, answer.bound - price * sum(row.budget_bytes - row.constant_bytes for row in rows))
            if lower >= self.known * (1 - PROVED):
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
                high = learnt.price = price
            # If the excess costs many steps already, and a higher price changed nothing, no price will help.
            if (high and low) or (price * over > 10 * base.objective and answer.choices == answers[-2].choices):
                break
            if self.limit.is_over:
                break
            price = high / TUNING.price_step if high else TUNING.price_step * price
        # An answer that is known elsewhere leaves as much to be won as one that is found here; none leaves the step itself.
        least = min(self.known, best.objective if best is not None else np.inf)
        room = min(least - lower, base.objective)
        is_left = best is None and self.may_send_less()
        mixed = None if is_left else self.mix(rows, answers, self.allowed(gap), room, least < np.inf)
        if mixed is not None and (best is None or mixed.objective < best.objective):
            best = mixed
        if best is None:
            problem.rows[:] = rows
            return dataclasses.replace(base, choices=(), bound=lower, status="infeasible")
        return best.bounded(lower)

    def exchanged(
        self, rows: Sequence[MemoryRow], answers: Sequence[Solution], share: float
    ) -> tuple[Solution, list[MemoryRow]]:
        """As `aim`, by exchanges between answers."""
        within = Problem(self.problem.costs, self.problem.edges, _shares(rows, share))
        choices = exchange(within, [answer.choices for answer in answers])
        cost = self.problem.cost(choices) if choices else np.inf
        answer = Solution(choices, cost, 0.0, "feasible" if choices else "infeasible", "exchanges")
        return answer, self.broken_rows(choices) if choices else []

    def mix(
        self, rows: Sequence[MemoryRow], answers: Sequence[Solution], gap: float, room: float, is_known: bool
    ) -> Solution | None:
        """The least assignment within the rows that takes each node's choice from one of `answers`; by exchanges if what it
        may win, `room` at most, repays no ILP. If they find none, by one nevertheless, unless another answer `is_known`, and
        it would not repay if it won all of that."""
        kept = [{answer.choices[node] for answer in answers} for node in range(len(self.problem.costs))]
        costs = []
        for cost, own in zip(self.problem.costs, kept, strict=True):
            mask = np.zeros(len(cost), bool)
            mask[list(own)] = True
            costs.append(np.where(mask, cost, np.inf))
        pairs = sum(len(kept[one]) * len(kept[other]) for one, other in self.problem.edges)
        seconds = _solve_seconds(pairs, rows)
        is_quick = seconds > self.limit.worth(TUNING.hoped * room)
        is_left = is_known and seconds > self.limit.worth(room)
        share = 1.0
        for attempt in range(2 * TUNING.price_mixes):
            answer, broken = self.exchanged(rows, answers, share) if is_quick else self.aim(costs, rows, share, gap)
            if not answer.choices and is_quick and not is_left:
                answer, broken = self.aim(costs, rows, share, gap)
            if not broken:
                mixed = f"{answer.solver}, what prices on memory found"
                return dataclasses.replace(answer, status="feasible", solver=mixed) if answer.choices else None
            if self.limit.is_over:
                break
            if attempt + 1 >= TUNING.price_mixes:
                # Each attempt peaks at another moment: lower all budgets.
                share *= min(row.budget_bytes / row.used(answer.choices) for row in broken)
            rows = [*rows, *broken]
        return None


def _solve_seconds(pairs: int, rows: Sequence[MemoryRow]) -> float:
    """Estimated seconds of an ILP with so many pairs of choices and these rows."""
    return pairs * len(rows) / TUNING.solver_pairs_per_second


def _shares(rows: Sequence[MemoryRow], share: float) -> list[MemoryRow]:
    """The rows within a share of their budgets."""
    return [dataclasses.replace(row, budget_bytes=share * row.budget_bytes) for row in rows]
