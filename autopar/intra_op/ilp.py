"""The integer linear program of a choice problem, solved through PuLP.

In:     `Problem` (usually what `elimination.py` left), a solver's name, a time limit.
Out:    `Solution` with an honest status: PuLP says "Optimal" also when a solver ran out of time, so the solver's own
        bound decides.
Method: one 0/1 variable per node and choice, exactly one chosen; one continuous variable per pair of choices of an
        edge whose sums over either side equal the choices (the local marginal polytope: tight on trees). Rows and
        columns of an edge's matrix that are equal share a variable. Zheng et al., "Alpa", OSDI 2022, sec. 4.2, without
        its products of one-hot vectors.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pulp

from autopar.errors import SolverError
from autopar.intra_op.problem import PROVED, MemoryRow, Problem, Solution
from autopar.intra_op.stoppable import StoppableHiGHS
from autopar.options import SOLVERS

_TIES = 1e-7
"""Part of the cost by which choices are told apart that cost the same: less than counts as a gap."""


def solve_ilp(problem: Problem, solver: str = "highs", seconds: float = 60.0, gap: float = 1e-6) -> Solution:
    """Solve `problem` to optimality or until the time is up.

    Args:
        problem: Node and edge costs in seconds, memory rows in bytes.
        solver: `"highs"` or `"cbc"`.
        seconds: Time limit of the solver.
        gap: Relative gap at which it may stop.

    Returns:
        The best assignment found; status `"infeasible"` with no choices where there is none.
    """
    if not problem.costs:
        return Solution((), 0.0, 0.0, "optimal", "nothing to choose")
    finite = np.concatenate(
        [c[np.isfinite(c)] for c in problem.costs] + [m[np.isfinite(m)].ravel() for m in problem.edges.values()]
    )
    # Solvers' tolerances are absolute, about 1e-6: seconds are scaled so that the objective is about 1e5.
    about = _about(problem)
    scale = min(1e5 / about, 1e8 / max(float(finite.max(initial=0.0)), about))
    costs = _without_ties(problem, about)
    model = pulp.LpProblem("sharding", pulp.LpMinimize)
    chosen = [
        [model.add_variable(f"x{n}_{k}", cat=pulp.LpBinary) if np.isfinite(cost[k]) else None for k in range(len(cost))]
        for n, cost in enumerate(problem.costs)
    ]
    objective = [
        (x, float(c) * scale)
        for xs, cost in zip(chosen, costs, strict=True)
        for x, c in zip(xs, cost, strict=True)
        if x is not None and c
    ]
    for n, xs in enumerate(chosen):
        model += _expression([(x, 1) for x in xs if x is not None]) == 1, f"one_{n}"
    copies: list[list[tuple[Any, float]]] = [[] for _ in problem.rows]
    edges = dict(problem.edges)
    for row in problem.rows:
        for u, v in row.pairs:
            edges.setdefault((u, v), np.zeros((len(problem.costs[u]), len(problem.costs[v]))))
    for number, ((u, v), matrix) in enumerate(sorted(edges.items())):
        holders = [k for k, row in enumerate(problem.rows) if (u, v) in row.pairs]
        tables = [matrix * scale, *(problem.rows[k].pairs[u, v] / _unit(problem.rows[k]) for k in holders)]
        pairs, merged = _edge_variables(model, number, chosen[u], chosen[v], np.stack(tables, axis=-1))
        objective += _terms(pairs, merged[..., 0])
        for place, k in enumerate(holders, 1):
            copies[k] += _terms(pairs, merged[..., place])
    for number, row in enumerate(problem.rows):
        unit = _unit(row)
        terms = copies[number] + [
            (x, float(b) / unit)
            for n, bytes_of in row.bytes_of.items()
            for x, b in zip(chosen[n], bytes_of, strict=True)
            if x is not None and b
        ]
        model += _expression(terms) <= (row.budget_bytes - row.constant_bytes) / unit, f"memory_{number}"
    model.setObjective(_expression(objective))
    # Where nothing may be left, not even ties are.
    left = gap / 2 if gap > PROVED else 0.0
    ended = _ended(model, model.solve(make_solver(solver, seconds, left)))
    size = f"{solver} on {len(problem.costs)} nodes, {model.numVariables()} variables, {model.numConstraints()} rows"
    return _read_solution(problem, chosen, ended, size, scale, gap)


def _about(problem: Problem) -> float:
    """What an assignment costs, roughly: each node by itself takes its least choice; the largest cost if that is forbidden."""
    cost = problem.cost([int(np.argmin(cost)) for cost in problem.costs])
    if np.isfinite(cost) and cost > 0:
        return cost
    finite = [values[np.isfinite(values)] for values in (*problem.costs, *problem.edges.values())]
    return max([1e-30, *(float(values.max(initial=0.0)) for values in finite)])


def _without_ties(problem: Problem, about: float) -> list[np.ndarray]:
    """Costs that differ a little by the numbers of node and choice, so that of equal assignments one is the least.

    Solvers take whichever of them they see first, which may depend on how they are run.
    """
    step = _TIES * about / len(problem.costs)
    random = np.random.default_rng(0)
    return [cost + step * random.random(len(cost)) for cost in problem.costs]


def _expression(terms: Sequence[tuple[Any, float]]) -> pulp.LpAffineExpression:
    """Sum of (variable, factor), as PuLP 3 and 4 each want it made."""
    make = getattr(pulp.LpAffineExpression, "from_list", pulp.LpAffineExpression)
    return make(terms)


def make_solver(name: str, seconds: float, gap: float) -> Any:
    """The PuLP solver: one thread, fixed seed.

    Raises:
        SolverError: The name is not known, or the solver is not installed.
    """
    match name:
        case "highs":
            # HiGHS looks for symmetry by the clock: on a busy machine ties would end otherwise.
            calm = {"random_seed": 0, "parallel": "off", "mip_detect_symmetry": False}
            solver = StoppableHiGHS(msg=False, timeLimit=seconds, gapRel=gap, threads=1, **calm)
        case "cbc":
            solver = _cbc(msg=False, timeLimit=seconds, gapRel=gap, threads=1, options=["randomSeed 1"])
        case _:
            raise SolverError(
                "unknown solver.",
                given=f"solver={name!r}",
                wrong=f"autopar knows {', '.join(map(repr, SOLVERS))}.",
                do="name one of them.",
                solver=name,
            )
    if not solver.available():
        raise SolverError(
            f"solver {name!r} is not installed.",
            given=f"solver={name!r}",
            wrong="PuLP does not find it.",
            do='pip install "pulp[cbc,highs]", or name another solver.',
            solver=name,
        )
    return solver


def _cbc(**settings: Any) -> Any:
    """CBC where PuLP finds it: its own copy (PuLP 3), or the one `cbcbox` installs (PuLP 4)."""
    for kind in ("PULP_CBC_CMD", "COIN_CMD"):
        made = getattr(pulp, kind, None)
        if made is not None and made(msg=False).available():
            return made(**settings)
    try:
        path = importlib.import_module("cbcbox").cbc_bin_path()
    except (ImportError, AttributeError):
        path = "cbc"
    return pulp.COIN_CMD(path=path, **settings)


def _edge_variables(
    model: pulp.LpProblem, number: int, left: Sequence[Any], right: Sequence[Any], tables: np.ndarray
) -> tuple[Mapping[tuple[int, int], Any], np.ndarray]:
    """Add one edge's pair variables to the model.

    Args:
        model: To be added to.
        number: Of the edge, for names.
        left: Choice variables of one end; None where forbidden.
        right: Of the other.
        tables: What a pair of choices costs, and what it takes in each memory row, `[left, right, 1 + rows]`.

    Returns:
        The variable of each pair of classes of choices that are the same to this edge, and the tables of these classes.
    """
    rows, row_of = np.unique(tables, axis=0, return_inverse=True)
    merged, column_of = np.unique(rows, axis=1, return_inverse=True)
    if merged.shape[:2] == (1, 1) and not merged.any():
        return {}, merged
    pairs = {
        (i, j): model.add_variable(f"e{number}_{i}_{j}", lowBound=0)
        for i in range(merged.shape[0])
        for j in range(merged.shape[1])
        if np.isfinite(merged[i, j, 0])
    }
    for side, classes, choices, length in (
        (0, np.ravel(row_of), left, merged.shape[0]),
        (1, np.ravel(column_of), right, merged.shape[1]),
    ):
        for k in range(length):
            members = [(x, -1) for x, c in zip(choices, classes, strict=True) if c == k and x is not None]
            terms = [(e, 1) for key, e in pairs.items() if key[side] == k]
            model += _expression(terms + members) == 0, f"m{number}_{side}_{k}"
    return pairs, merged


def _terms(pairs: Mapping[tuple[int, int], Any], table: np.ndarray) -> list[tuple[Any, float]]:
    return [(variable, float(table[key])) for key, variable in pairs.items() if table[key]]


def _unit(row: MemoryRow) -> float:
    """Bytes that count as one in a row: solvers like numbers near one."""
    return max(row.budget_bytes, 1.0)


@dataclass(frozen=True, slots=True)
class _Ended:
    """How a solver ended: whether it found anything, whether it proved it least, and its bound on the objective."""

    found: bool
    proved: bool
    bound: float


def _ended(model: pulp.LpProblem, outcome: Any) -> _Ended:
    if hasattr(outcome, "best_bound"):  # PuLP 4: optimal is 1, and -7 that the gap asked for was reached
        return _Ended(outcome.has_solution, int(outcome.status) in (1, -7), outcome.best_bound or 0.0)
    # PuLP 3 hands no bound on, but its solver does where it runs in this process.
    highs = getattr(model, "solverModel", None)
    bound = float(highs.getInfo().mip_dual_bound) if highs is not None and hasattr(highs, "getInfo") else 0.0
    return _Ended(model.status != pulp.LpStatusInfeasible, model.sol_status == pulp.LpSolutionOptimal, bound)


def _read_solution(
    problem: Problem, chosen: Sequence[Sequence[Any]], ended: _Ended, size: str, scale: float, gap: float
) -> Solution:
    nothing = any(not any(x is not None and x.varValue is not None for x in xs) for xs in chosen)
    if not ended.found or nothing:
        return Solution((), float("inf"), float("inf"), "infeasible", size)
    choices = tuple(
        max((k for k, x in enumerate(xs) if x is not None), key=lambda k: (xs[k].varValue or 0.0, -k)) for xs in chosen
    )
    objective = problem.cost(choices)
    if not (np.isfinite(objective) and problem.fits(choices)):
        return Solution((), float("inf"), float("inf"), "infeasible", size)
    lower = objective * (1 - gap / 2) if ended.proved else 0.0
    return Solution(choices, objective, objective, "feasible", size).bounded(max(lower, ended.bound / scale))
