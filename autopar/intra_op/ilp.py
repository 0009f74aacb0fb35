"""Solves a choice problem as an integer linear program.

In:     `Problem` (usually the core that `elimination.py` leaves), a solver's name, a time limit.
Out:    `Solution`, whose status follows from the bound: solvers report "optimal" also when they ran out of time.
Method: one 0/1 variable per node and choice, exactly one of a node's chosen; one continuous variable per pair of choices of
        an edge, whose sums over either side equal the choices (the local marginal polytope, tight on trees). Equal rows and
        columns of an edge's matrix share variables. Zheng et al., "Alpa", OSDI 2022, sec. 4.2, without its products of
        one-hot vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.sparse import coo_array

from autopar.intra_op.milp import Ended, Model, solve_model
from autopar.intra_op.problem import PROVED, MemoryRow, Problem, Solution

_TIES = 1e-7
"""Relative perturbation that breaks ties between choices; smaller than any gap that counts."""


def solve_ilp(
    problem: Problem, solver: str = "highs", seconds: float = 60.0, gap: float = 1e-6, start: Sequence[int] = ()
) -> Solution:
    """Solve `problem` to optimality or until the time limit.

    Args:
        problem: Node and edge costs in seconds, memory rows in bytes.
        solver: `"highs"` or `"cbc"`.
        seconds: Time limit of the solver.
        gap: Relative gap at which it may stop.
        start: A known assignment, which HiGHS begins with: it finds good ones late.

    Returns:
        The best assignment found; without choices, and with status `"infeasible"`, if there is none.
    """
    if not problem.costs:
        return Solution((), 0.0, 0.0, "optimal", "nothing to choose")
    if not all(np.isfinite(cost).any() for cost in problem.costs):
        return _nothing(solver)
    largest = max(
        float(values.max(initial=0.0, where=np.isfinite(values)))
        for values in (*problem.costs, *problem.edges.values())
    )
    # Solvers' tolerances are absolute, about 1e-6: seconds are scaled so that the objective is about 1e5.
    about = _about(problem)
    scale = min(1e5 / about, 1e8 / max(largest, about))
    program = _Program(problem, scale, about)
    model = program.model(start if start and np.isfinite(problem.cost(start)) else ())
    # A proof leaves no gap at all, so that ties are broken, too.
    ended = solve_model(model, solver, seconds, gap / 2 if gap > PROVED else 0.0)
    size = f"{solver} on {len(problem.costs)} nodes, {len(model.costs)} variables, {len(model.lower)} rows"
    return _read_solution(problem, program, ended, size, scale, gap)


def _about(problem: Problem) -> float:
    """Order of magnitude of the cost: with each node's cheapest choice; if that is forbidden, the largest finite cost."""
    cost = problem.cost([int(np.argmin(cost)) for cost in problem.costs])
    if np.isfinite(cost) and cost > 0:
        return cost
    finite = [values[np.isfinite(values)] for values in (*problem.costs, *problem.edges.values())]
    return max([1e-30, *(float(values.max(initial=0.0)) for values in finite)])


def _without_ties(problem: Problem, about: float) -> list[np.ndarray]:
    """Perturb costs a little, so that of equally good assignments one is the least.

    Solvers return whichever of them they see first, which may depend on how they are run.
    """
    step = _TIES * about / len(problem.costs)
    random = np.random.default_rng(0)
    return [cost + step * random.random(len(cost)) for cost in problem.costs]


@dataclass(slots=True)
class _Rows:
    """Collects the rows of a sparse matrix: pieces of `(row, column, value)`, and bounds of each row."""

    count: int = 0
    rows: list[np.ndarray] = field(default_factory=list)
    columns: list[np.ndarray] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)
    upper: list[np.ndarray] = field(default_factory=list)
    lower: list[np.ndarray] = field(default_factory=list)

    def put(self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray | float) -> None:
        """Add entries of the open rows; `rows` counts from the first open row."""
        self.rows.append(self.count + rows)
        self.columns.append(columns)
        self.values.append(np.broadcast_to(np.asarray(values, np.float64), columns.shape))

    def close(self, lower: np.ndarray, upper: np.ndarray) -> None:
        """Close the open rows, with their bounds."""
        self.lower.append(lower)
        self.upper.append(upper)
        self.count += len(lower)


class _Program:
    """The columns and rows of a choice problem.

    `column_of`: per node, the column of each of its choices; -1: forbidden.
    """

    def __init__(self, problem: Problem, scale: float, about: float):
        lengths = [len(cost) for cost in problem.costs]
        costs = np.concatenate(_without_ties(problem, about))
        allowed = np.isfinite(costs)
        columns = np.where(allowed, np.cumsum(allowed) - 1, -1)
        self.column_of = np.split(columns, np.cumsum(lengths)[:-1])
        self.num_binary = int(allowed.sum())
        self.count = self.num_binary
        self.costs = [costs[allowed] * scale]
        self.rows = _Rows()
        nodes = np.repeat(np.arange(len(lengths)), lengths)
        self.rows.put(nodes[allowed], columns[allowed], 1.0)
        one = np.ones(len(lengths))
        self.rows.close(one, one)
        self.taken: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in problem.rows]
        edges = dict(problem.edges)
        for row in problem.rows:
            for u, v in row.pairs:
                edges.setdefault((u, v), np.zeros((lengths[u], lengths[v])))
        for (u, v), matrix in sorted(edges.items()):
            holders = [k for k, row in enumerate(problem.rows) if (u, v) in row.pairs]
            tables = [matrix * scale, *(problem.rows[k].pairs[u, v] / _unit(problem.rows[k]) for k in holders)]
            pairs, merged = self.edge(u, v, np.stack(tables, axis=-1))
            for place, k in enumerate(holders, 1):
                self.taken[k].append((pairs, merged[:, place]))
        for number, row in enumerate(problem.rows):
            self.memory(row, self.taken[number])

    def edge(self, u: int, v: int, tables: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Add an edge's pair variables, one per pair of classes of choices that are the same to this edge.

        Args:
            u: One end.
            v: The other end.
            tables: Cost of each pair of choices, and its bytes in each memory row, `[u, v, 1 + rows]`.

        Returns:
            The columns of the pairs, and their tables, `[pair, 1 + rows]`.
        """
        merged, row_of = _merged(tables)
        turned, column_of = _merged(merged.swapaxes(0, 1))
        merged = turned.swapaxes(0, 1)
        if merged.shape[:2] == (1, 1) and not merged.any():
            return np.zeros(0, np.int64), np.zeros((0, tables.shape[2]))
        at = np.nonzero(np.isfinite(merged[..., 0]))
        entries = merged[at]
        pairs = self.count + np.arange(len(entries))
        self.count += len(entries)
        self.costs.append(entries[:, 0])
        for node, classes, ends, length in (
            (u, row_of, at[0], merged.shape[0]),
            (v, column_of, at[1], merged.shape[1]),
        ):
            chosen = self.column_of[node]
            self.rows.put(ends, pairs, 1.0)
            self.rows.put(classes[chosen >= 0], chosen[chosen >= 0], -1.0)
            self.rows.close(np.zeros(length), np.zeros(length))
        return pairs, entries

    def memory(self, row: MemoryRow, pairs: list[tuple[np.ndarray, np.ndarray]]) -> None:
        """Add a memory row."""
        for columns, taken in pairs:
            self.rows.put(np.zeros(len(columns), np.int64), columns, taken)
        for node, num_bytes in row.bytes_of.items():
            chosen = self.column_of[node]
            here = chosen >= 0
            self.rows.put(np.zeros(int(here.sum()), np.int64), chosen[here], num_bytes[here] / _unit(row))
        most = (row.budget_bytes - row.constant_bytes) / _unit(row)
        self.rows.close(np.array([-np.inf]), np.array([most]))

    def model(self, start: Sequence[int]) -> Model:
        """The program as arrays, beginning with an assignment if there is one."""
        begin = np.zeros(self.num_binary if start else 0)
        for columns, choice in zip(self.column_of, start, strict=True) if start else ():
            begin[columns[choice]] = 1.0
        rows, columns, values = map(np.concatenate, (self.rows.rows, self.rows.columns, self.rows.values))
        matrix = coo_array((values, (rows, columns)), shape=(self.rows.count, self.count)).tocsr()
        matrix.eliminate_zeros()
        return Model(
            np.concatenate(self.costs),
            self.num_binary,
            matrix,
            np.concatenate(self.rows.lower),
            np.concatenate(self.rows.upper),
            begin,
        )


def _merged(tables: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct tables along the first dim, in order of first appearance; and for each table, the index of its equal."""
    keys: dict[bytes, int] = {}
    which = np.array([keys.setdefault(table.tobytes(), len(keys)) for table in np.ascontiguousarray(tables)])
    first = np.unique(which, return_index=True)[1]
    return tables[first], which


def _unit(row: MemoryRow) -> float:
    """Bytes per unit of a memory row: solvers need coefficients near one."""
    return max(row.budget_bytes, 1.0)


def _nothing(size: str) -> Solution:
    return Solution((), float("inf"), float("inf"), "infeasible", size)


def _read_solution(problem: Problem, program: _Program, ended: Ended, size: str, scale: float, gap: float) -> Solution:
    if ended.values is None:
        return _nothing(size)
    values = np.append(ended.values, -1.0)  # at index -1: forbidden choices
    choices = tuple(int(np.argmax(values[columns])) for columns in program.column_of)
    objective = problem.cost(choices)
    if not (np.isfinite(objective) and problem.fits(choices)):
        return _nothing(size)
    lower = objective * (1 - gap / 2) if ended.proved else 0.0
    return Solution(choices, objective, objective, "feasible", size).bounded(max(lower, ended.bound / scale))
