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
PROMISING = 8
"""Choices of a node, at most, that the ILP gets of a larger core, beside those around the best answer known."""
_MAX_PRICES = 10
ROUNDS = (120, 150, 200)
"""Rounds of message passing before each attempt of the ILP."""


def solve(problem: Problem, solver: str = "highs", seconds: float = 60.0, gap: float = 1e-6) -> Solution:
    """Least assignment of `problem`, its memory rows kept.

    Args:
        problem: Costs in seconds, rows in bytes.
        solver: `"highs"` or `"cbc"`.
        seconds: Time limit of the ILP solver.
        gap: Relative gap at which the solver may stop.
    """
    keep = {node for row in problem.rows for node in row.bytes_of}
    reduced = eliminate(problem, keep)
    position = {node: k for k, node in enumerate(reduced.kept)}
    # Elimination may have dropped forbidden choices of kept nodes: rows follow.
    for row in problem.rows:
        bytes_of = {position[n]: b[reduced.alive_of(n)] for n, b in row.bytes_of.items()}
        reduced.problem.rows.append(dataclasses.replace(row, bytes_of=bytes_of))
    core = _solve_core(reduced.problem, solver, seconds, gap)
    if core.status == "infeasible":
        return core
    choices = reduced.expand(core.choices)
    objective = problem.cost(choices)
    if objective == float("inf"):
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
) -> Solution:
    """Least assignment for which `broken_rows(choices)` is empty, adding the rows it names until it is.

    Returns:
        The assignment; `"infeasible"` where the rows collected cannot hold together.
    """
    if sum(matrix.size for matrix in problem.edges.values()) > SMALL_CORE:
        priced = _solve_priced(problem, broken_rows, solver, seconds)
        if priced is not None:
            return priced
    solution = solve(problem, solver, seconds)
    for _ in range(max_rounds):
        if solution.status == "infeasible":
            return solution
        rows = broken_rows(solution.choices)
        if not rows:
            return solution
        problem.rows.extend(rows)
        solution = solve(problem, solver, seconds)
    return dataclasses.replace(solution, status="infeasible", choices=()) if broken_rows(solution.choices) else solution


def _solve_priced(
    problem: Problem, broken_rows: Callable[[Sequence[int]], list[MemoryRow]], solver: str, seconds: float
) -> Solution | None:
    """Keep memory by a price on bytes instead of by rows: every problem is then one without rows, which solves fast.

    The price is doubled until everything fits, then narrowed down (Everett, "Generalized Lagrange multiplier method",
    Operations Research 1963). What the priced problem proves, less what the budget is worth at that price, bounds the
    least assignment from below. None where no price helps: the rows themselves must decide then.
    """
    base = solve(problem, solver, seconds)
    rows = broken_rows(base.choices) if base.choices else []
    if not rows:
        return base
    best: Solution | None = None
    lower = base.bound
    over = max(row.used(base.choices) - row.budget_bytes for row in rows)
    price, low, high = 0.01 * base.objective / max(over, 1.0), 0.0, 0.0
    for _ in range(_MAX_PRICES):
        costs = list(problem.costs)
        for row in rows:
            for node, num_bytes in row.bytes_of.items():
                costs[node] = costs[node] + price * num_bytes
        answer = solve(Problem(costs, problem.edges), solver, seconds)
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
        if high and low and high < 2 * low:
            break
        price = 4 * price if not high else high / 4 if not low else (low * high) ** 0.5
    if best is None:
        return None
    return dataclasses.replace(best, bound=min(lower, best.objective))


def _solve_core(core: Problem, solver: str, seconds: float, gap: float) -> Solution:
    pairs = sum(matrix.size for matrix in core.edges.values())
    if pairs <= SMALL_CORE:
        return solve_ilp(core, solver, seconds, gap)
    # By size and not by the clock, so that the same problem always has the same answer.
    attempts = ROUNDS[: 3 - (pairs > LARGE_CORE) - (pairs > 4 * LARGE_CORE)]
    enough = gap if pairs <= LARGE_CORE else max(gap, 1e-3)
    promising = max(3, min(PROMISING, int((SMALL_CORE / max(len(core.edges), 1)) ** 0.5)))
    ascent = Ascent(core)
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
    small = Problem(
        [cost[alive] for cost, alive in zip(core.costs, kept, strict=True)],
        {(u, v): matrix[np.ix_(kept[u], kept[v])] for (u, v), matrix in core.edges.items()},
        [dataclasses.replace(row, bytes_of={n: b[kept[n]] for n, b in row.bytes_of.items()}) for row in core.rows],
    )
    answer = solve_ilp(small, solver, seconds, gap)
    return dataclasses.replace(answer, choices=tuple(int(kept[n][k]) for n, k in enumerate(answer.choices)))
