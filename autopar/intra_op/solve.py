"""Solve a choice problem: eliminate, bound, hand what matters to the ILP, expand; memory rows by demand.

In:     `Problem` without memory rows, and a function that names the rows an assignment breaks.
Out:    `Solution` for all nodes.
Method: elimination is exact, so the whole is as optimal as the core. A small core goes to the ILP as it is. Of a large
        one message passing gives a lower bound and says how promising each choice is; the ILP gets the best few of each
        node, then those that are best beside what it found, until that helps no more; what is left between its answer
        and the bound is the gap. Memory rows are cutting planes: the assignment is checked by the exact liveness of its
        program, the moments that are over budget become rows, and it is solved again; the nodes in a row are kept from
        elimination. In a large problem the bytes of those moments get a price instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from autopar.intra_op.dual import Ascent
from autopar.intra_op.elimination import eliminate
from autopar.intra_op.ilp import solve_ilp
from autopar.intra_op.problem import MemoryRow, Problem, Solution

SMALL_CORE = 60_000
"""Pairs of choices that meet on an edge: up to so many the ILP gets them all, and proves its answer least."""
LARGE_CORE = 500_000
"""Beyond so many (meshes of three axes, large models without equal layers) a small gap is left as it is."""
LARGE_GAP = 1e-3
"""So small."""
_EARLY_ROUNDS = 20
"""Rounds after which a large problem may be given up for an answer known from elsewhere."""
PROMISING = 8
"""Choices of a node, at most, that the ILP gets of a larger core, beside those around the best answer known."""
_SMALL_WITH_ROWS = 10_000
"""The same for a problem with memory rows, which are harder."""
_MAX_PRICES = 10
_PRICE_STEP = 4.0
_MAX_MIXES = 5
ROUNDS = (120, 150, 200)
"""Rounds of message passing before each attempt of the ILP."""


def solve(
    problem: Problem, solver: str = "highs", seconds: float = 60.0, gap: float = 1e-6, known: float = np.inf
) -> Solution:
    """Least assignment of `problem`, its memory rows kept.

    Args:
        problem: Costs in seconds, rows in bytes.
        solver: `"highs"` or `"cbc"`.
        seconds: Time limit of the ILP solver.
        gap: Relative gap at which the solver may stop.
        known: Cost of an answer to the same question in another form (another mesh): where a large problem is proved to
            have none better, to the gap that is left there anyway, the search ends with the status `"beaten"`.
    """
    reduced = eliminate(problem, {node for row in problem.rows for node in row.nodes})
    position = {node: k for k, node in enumerate(reduced.kept)}
    # Elimination may have dropped forbidden choices of kept nodes: rows follow.
    reduced.problem.rows.extend(row.narrowed(position, reduced.alive_of) for row in problem.rows)
    core = _solve_core(reduced.problem, solver, seconds, gap, known - reduced.constant)
    if core.status == "infeasible":
        return core
    choices = reduced.expand(core.choices)
    objective = problem.cost(choices)
    if objective == float("inf") and core.status != "beaten":
        return Solution((), objective, objective, "infeasible", core.solver)
    # "optimal" means within `gap`, one part in a million: that counts as proved.
    lower = objective if core.status == "optimal" else min(objective, core.bound + reduced.constant)
    return Solution(choices, objective, lower, core.status, core.solver)


def solve_within(
    problem: Problem,
    broken_rows: Callable[[Sequence[int]], list[MemoryRow]],
    solver: str = "highs",
    seconds: float = 60.0,
    max_rounds: int = 30,
    known: float = np.inf,
) -> Solution:
    """Least assignment for which `broken_rows(choices)` is empty, adding the rows it names until it is.

    Returns:
        The assignment; `"infeasible"` where the rows collected cannot hold together.
    """
    base = solve(problem, solver, seconds, known=known)
    if base.status in ("infeasible", "beaten"):
        return base
    rows = broken_rows(base.choices)
    if not rows:
        return base
    problem.rows.extend(rows)
    if any(row.least(problem.costs) > row.budget_bytes for row in problem.rows):
        return dataclasses.replace(base, choices=(), status="infeasible")
    if sum(matrix.size for matrix in problem.edges.values()) <= _SMALL_WITH_ROWS:
        exact = _cut(problem, broken_rows, solver, seconds, max_rounds)
        if exact.status != "infeasible":
            return exact
    # A row says what is alive at its moment in one program; of another it may say too much.
    return _solve_priced(problem, base, broken_rows, solver, seconds)


def _cut(
    problem: Problem,
    broken_rows: Callable[[Sequence[int]], list[MemoryRow]],
    solver: str,
    seconds: float,
    max_rounds: int,
) -> Solution:
    """Solve and add the rows that are broken, again and again, until none is."""
    for _ in range(max_rounds):
        solution = solve(problem, solver, seconds)
        rows = broken_rows(solution.choices) if solution.choices else []
        if not rows:
            return solution
        problem.rows.extend(rows)
    return dataclasses.replace(solution, status="infeasible", choices=())


def _solve_priced(
    problem: Problem,
    base: Solution,
    broken_rows: Callable[[Sequence[int]], list[MemoryRow]],
    solver: str,
    seconds: float,
) -> Solution:
    """Keep memory by a price on bytes instead of by rows: every problem is then one without rows, which solves fast.

    The price is raised until everything fits, then narrowed down (Everett, "Generalized Lagrange multiplier method",
    Operations Research 1963). What the priced problem proves, less what the budget is worth at that price, bounds the
    least assignment from below. One price for all gives layers that are alike the same choices, where the budget may
    have room for some of them: so at the end rows choose among what the prices found.
    """
    best: Solution | None = None
    rows, answers, lower = list(problem.rows), [base], base.bound
    over = max(row.used(base.choices) - row.budget_bytes for row in rows)
    price, low, high = 0.01 * base.objective / max(over, 1.0), 0.0, 0.0
    for _ in range(_MAX_PRICES):
        answer = solve(problem.priced(rows, price), solver, seconds)
        answers.append(answer)
        lower = max(lower, answer.bound - price * sum(row.budget_bytes - row.constant_bytes for row in rows))
        broken = broken_rows(answer.choices)
        if broken:
            rows += [row for row in broken if all(known.used(answer.choices) <= known.budget_bytes for known in rows)]
            low = price
        else:
            objective = problem.cost(answer.choices)
            if best is None or objective < best.objective:
                best = Solution(answer.choices, objective, 0.0, "feasible", f"{answer.solver}, a price on memory")
            high = price
        # Where saving the bytes is worth many steps already, and nothing more is saved, no price will help.
        if (high and low) or (price * over > 10 * base.objective and answer.choices == answers[-2].choices):
            break
        price = high / _PRICE_STEP if high else _PRICE_STEP * price
    mixed = _mix(problem, rows, answers, broken_rows, solver, seconds)
    if mixed is not None and (best is None or mixed.objective < best.objective):
        best = mixed
    if best is None:
        problem.rows[:] = rows
        return dataclasses.replace(base, choices=(), status="infeasible")
    return dataclasses.replace(best, bound=min(lower, best.objective))


def _mix(
    problem: Problem,
    rows: Sequence[MemoryRow],
    answers: Sequence[Solution],
    broken_rows: Callable[[Sequence[int]], list[MemoryRow]],
    solver: str,
    seconds: float,
) -> Solution | None:
    """The least assignment under the rows themselves that takes each node's choice from one of `answers`."""
    costs = []
    for node, cost in enumerate(problem.costs):
        mask = np.zeros(len(cost), bool)
        mask[[answer.choices[node] for answer in answers]] = True
        costs.append(np.where(mask, cost, np.inf))
    share = 1.0
    for attempt in range(2 * _MAX_MIXES):
        aimed = [dataclasses.replace(row, budget_bytes=share * row.budget_bytes) for row in rows]
        answer = solve(Problem(costs, problem.edges, aimed), solver, seconds)
        broken = broken_rows(answer.choices) if answer.choices else []
        if not broken:
            mixed = f"{answer.solver}, what prices on memory found"
            return dataclasses.replace(answer, status="feasible", solver=mixed) if answer.choices else None
        if attempt + 1 >= _MAX_MIXES:
            # The fullest moment is another one each time: aiming lower ends it.
            share *= min(row.budget_bytes / row.used(answer.choices) for row in broken)
        rows = [*rows, *broken]
    return None


def _solve_core(core: Problem, solver: str, seconds: float, gap: float, known: float) -> Solution:
    pairs = sum(matrix.size for matrix in core.edges.values())
    if pairs <= SMALL_CORE:
        return solve_ilp(core, solver, seconds, gap)
    # By size and not by the clock, so that the same problem always has the same answer.
    attempts = ROUNDS[: 3 - (pairs > LARGE_CORE) - (pairs > 4 * LARGE_CORE)]
    enough = gap if pairs <= LARGE_CORE else max(gap, LARGE_GAP)
    promising = max(3, min(PROMISING, int((SMALL_CORE / max(len(core.edges), 1)) ** 0.5)))
    ascent = Ascent(core)
    if pairs > LARGE_CORE and np.isfinite(known):
        early = ascent.run(_EARLY_ROUNDS, gap=gap)
        if early.lower >= known - enough * abs(known):
            return Solution(early.choices, early.upper, early.lower, "beaten", "message passing")
    best: Solution | None = None
    lower = 0.0
    for rounds in attempts:
        bounds = ascent.run(rounds, best.objective if best else np.inf, gap)
        lower = max(lower, bounds.lower)
        room = bounds.upper - bounds.lower + gap * abs(bounds.upper)
        masks = [_least(excess, promising) & (core.rows != [] or excess <= room) for excess in bounds.excess]
        near = best.choices if best else bounds.choices
        masks = [mask | around for mask, around in zip(masks, _around(core, near), strict=True)]
        if core.rows:
            masks = [mask | thrifty for mask, thrifty in zip(masks, _thrifty(core), strict=True)]
        answer = _solve_restricted(core, masks, solver, seconds, gap)
        if answer.status != "infeasible" and (best is None or answer.objective < best.objective):
            best = answer
        if best is not None and best.objective - lower <= enough * abs(best.objective):
            break
    if best is None:
        return solve_ilp(core, solver, seconds, gap)
    proved = best.objective - lower <= gap * abs(best.objective)
    return Solution(
        best.choices,
        best.objective,
        min(lower, best.objective),
        "optimal" if proved else "feasible",
        f"{best.solver}, the promising ones of {sum(map(len, core.costs))} choices",
    )


def _around(core: Problem, choices: Sequence[int]) -> list[np.ndarray]:
    """The best choices of each node while all others stay at `choices`."""
    costs = [cost.copy() for cost in core.costs]
    for (u, v), matrix in core.edges.items():
        costs[u] += matrix[:, choices[v]]
        costs[v] += matrix[choices[u]]
    masks = [_least(cost, PROMISING // 4) for cost in costs]
    for mask, choice in zip(masks, choices, strict=True):
        mask[choice] = True
    return masks


def _thrifty(core: Problem) -> list[np.ndarray]:
    """The choices of each node that take least memory."""
    masks = [np.zeros(len(cost), bool) for cost in core.costs]
    for row in core.rows:
        for node, num_bytes in row.bytes_of.items():
            masks[node] |= _least(np.where(np.isfinite(core.costs[node]), num_bytes, np.inf), PROMISING)
    return masks


def _least(values: np.ndarray, count: int) -> np.ndarray:
    mask = np.zeros(len(values), bool)
    mask[np.argsort(values, kind="stable")[:count]] = True
    return mask


def _solve_restricted(core: Problem, masks: Sequence[np.ndarray], solver: str, seconds: float, gap: float) -> Solution:
    """The least assignment that takes of each node one of the choices that its mask names."""
    kept = [np.flatnonzero(mask & np.isfinite(cost)) for mask, cost in zip(masks, core.costs, strict=True)]
    same = dict(enumerate(range(len(kept))))
    small = Problem(
        [cost[alive] for cost, alive in zip(core.costs, kept, strict=True)],
        {(u, v): matrix[np.ix_(kept[u], kept[v])] for (u, v), matrix in core.edges.items()},
        [row.narrowed(same, kept.__getitem__) for row in core.rows],
    )
    answer = solve_ilp(small, solver, seconds, gap)
    return dataclasses.replace(answer, choices=tuple(int(kept[n][k]) for n, k in enumerate(answer.choices)))
