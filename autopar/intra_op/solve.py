"""Solve a choice problem: eliminate, hand the core to the ILP, expand; memory rows by demand.

In:     `Problem` without memory rows, and a function that names the rows an assignment breaks.
Out:    `Solution` for all nodes.
Method: elimination is exact, so the whole is as optimal as the core. Memory rows are cutting planes: the assignment is
        checked by the exact liveness of its program, the moments that are over budget become rows, and it is solved
        again; the nodes in a row are kept from elimination.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from autopar.intra_op.elimination import eliminate
from autopar.intra_op.ilp import solve_ilp
from autopar.intra_op.problem import MemoryRow, Problem, Solution


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
    core = solve_ilp(reduced.problem, solver, seconds, gap)
    if core.status == "infeasible":
        return core
    choices = reduced.expand(core.choices)
    objective = problem.cost(choices)
    if objective == float("inf"):
        return Solution((), objective, objective, "infeasible", core.solver)
    # "optimal" means within `gap`, one part in a million: that counts as proved.
    bound = objective if core.status == "optimal" else min(objective, core.bound + reduced.constant)
    return Solution(choices, objective, bound, core.status, core.solver)


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
