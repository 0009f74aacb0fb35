"""Solve a choice problem: eliminate, bound, hand what matters to the ILP, expand.

In:     `Problem`.
Out:    `Solution` for all nodes.
Method: elimination is exact, so the whole is as optimal as the core. A small core goes to the ILP as it is, unless a
        gap may be left, for which message passing mostly does. Of a large one message passing gives a lower bound and says
        how promising each choice is; the ILP gets the best few of each node, then those that are best beside what it
        found, until that helps no more; what is left between its answer and the bound is the gap. Nodes in a memory row
        are kept from elimination.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from autopar.intra_op.dual import Ascent
from autopar.intra_op.elimination import eliminate
from autopar.intra_op.ilp import solve_ilp
from autopar.intra_op.problem import Problem, Solution
from autopar.intra_op.time_limit import TimeLimit, time_limit

PROVED = 1e-6
"""A gap of one part in a million counts as none."""
ROUGH = 1e-2
"""Where so much may be left, what message passing has found at its first attempt is taken, whatever it has proved."""
SMALL_CORE = 60_000
"""Pairs of choices that meet on an edge: up to so many the ILP gets them all, and proves its answer least."""
LARGE_CORE = 500_000
"""Beyond so many (meshes of three axes, large models without equal layers) a small gap is left as it is."""
LARGE_GAP = 1e-3
"""So small."""
_EARLY_ROUNDS = 10
"""Rounds after which a large problem may be given up for an answer known from elsewhere."""
PROMISING = 8
"""Choices of a node, at most, that the ILP gets of a larger core, beside those around the best answer known."""
ROUNDS = (120, 150, 200)
"""Rounds of message passing before each attempt of the ILP."""


def solve(
    problem: Problem,
    solver: str = "highs",
    seconds: float | TimeLimit = 60.0,
    gap: float = PROVED,
    known: float = np.inf,
) -> Solution:
    """Least assignment of `problem`, its memory rows kept.

    Args:
        problem: Costs in seconds, rows in bytes.
        solver: `"highs"` or `"cbc"`.
        seconds: Time limit of the ILP solver, in all. Where none is left, what message passing has found is taken.
        gap: Relative gap at which the search may stop; where it is more than `PROVED`, message passing alone may do.
        known: Cost of an answer to the same question in another form (another mesh): where a large problem is proved to
            have none better, to the gap that is left there anyway, the search ends with the status `"beaten"`.
    """
    reduced = eliminate(problem, {node for row in problem.rows for node in row.nodes})
    position = {node: k for k, node in enumerate(reduced.kept)}
    # Elimination may have dropped forbidden choices of kept nodes: rows follow.
    reduced.problem.rows.extend(row.narrowed(position, reduced.alive_of) for row in problem.rows)
    core = _solve_core(reduced.problem, solver, time_limit(seconds), gap, known - reduced.constant)
    if core.status == "infeasible":
        return core
    choices = reduced.expand(core.choices)
    objective = problem.cost(choices)
    if objective == float("inf") and core.status != "beaten":
        return Solution((), objective, objective, "infeasible", core.solver)
    # "optimal" means within `PROVED`.
    lower = objective if core.status == "optimal" else min(objective, core.bound + reduced.constant)
    return Solution(choices, objective, lower, core.status, core.solver)


def _solve_core(core: Problem, solver: str, limit: TimeLimit, gap: float, known: float) -> Solution:
    pairs = sum(matrix.size for matrix in core.edges.values())
    must = bool(core.rows) or not pairs
    if pairs <= SMALL_CORE and (must or (gap <= PROVED and not limit.is_spent)):
        answer = _solve_whole(core, solver, limit, gap)
        return answer if must or answer.status == "optimal" else _better(core, answer, gap)
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
        bounds = ascent.run(rounds if gap < ROUGH else rounds // 2, best.objective if best else np.inf, gap)
        lower = max(lower, bounds.lower)
        is_near = gap >= ROUGH or bounds.upper - lower <= enough * abs(bounds.upper)
        will_do = limit.is_spent or (gap > PROVED and is_near)
        if best is None and not core.rows and will_do and np.isfinite(bounds.upper):
            return Solution(bounds.choices, bounds.upper, lower, "feasible", "message passing")
        room = bounds.upper - bounds.lower + gap * abs(bounds.upper)
        masks = [_least(excess, promising) & (core.rows != [] or excess <= room) for excess in bounds.excess]
        near = best.choices if best else bounds.choices
        masks = [mask | around for mask, around in zip(masks, _around(core, near), strict=True)]
        if core.rows:
            masks = [mask | thrifty for mask, thrifty in zip(masks, _thrifty(core), strict=True)]
        answer = _solve_restricted(core, masks, solver, limit, gap)
        if answer.status != "infeasible" and (best is None or answer.objective < best.objective):
            best = answer
        if best is not None and (limit.is_spent or best.objective - lower <= enough * abs(best.objective)):
            break
    if best is None:
        return _solve_whole(core, solver, limit, gap)
    proved = best.objective - lower <= gap * abs(best.objective)
    return Solution(
        best.choices,
        best.objective,
        min(lower, best.objective),
        "optimal" if proved else "feasible",
        f"{best.solver}, the promising ones of {sum(map(len, core.costs))} choices",
    )


def _solve_whole(core: Problem, solver: str, limit: TimeLimit, gap: float) -> Solution:
    with limit.running() as seconds:
        return solve_ilp(core, solver, seconds, gap)


def _better(core: Problem, answer: Solution, gap: float) -> Solution:
    """What the solver found when its time was up, or what message passing finds in a moment."""
    bounds = Ascent(core).run(ROUNDS[0], gap=gap)
    lower = max(bounds.lower, answer.bound if answer.choices else 0.0)
    if answer.objective <= bounds.upper:
        return dataclasses.replace(answer, bound=min(lower, answer.objective))
    return Solution(bounds.choices, bounds.upper, min(lower, bounds.upper), "feasible", "message passing")


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


def _solve_restricted(
    core: Problem, masks: Sequence[np.ndarray], solver: str, limit: TimeLimit, gap: float
) -> Solution:
    """The least assignment that takes of each node one of the choices that its mask names."""
    kept = [np.flatnonzero(mask & np.isfinite(cost)) for mask, cost in zip(masks, core.costs, strict=True)]
    same = dict(enumerate(range(len(kept))))
    small = Problem(
        [cost[alive] for cost, alive in zip(core.costs, kept, strict=True)],
        {(u, v): matrix[np.ix_(kept[u], kept[v])] for (u, v), matrix in core.edges.items()},
        [row.narrowed(same, kept.__getitem__) for row in core.rows],
    )
    answer = _solve_whole(small, solver, limit, gap)
    return dataclasses.replace(answer, choices=tuple(int(kept[n][k]) for n, k in enumerate(answer.choices)))
