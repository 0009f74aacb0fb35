"""Improves an assignment by large-neighbourhood search.

In:     `Problem`, with or without memory rows, an assignment, a time limit.
Out:    the assignment, or a better one, with the same bound.
Method: the nodes of one neighbourhood at a time are solved for exactly, with all others fixed; neighbourhoods cover the
        problem, and rounds repeat until one gains too little or the time is up
        (Shaw, "Using constraint programming and local search methods to solve vehicle routing problems", CP 1998).
        Elimination solves most of them; if it leaves too large a core, the busiest nodes of that are fixed, too, until the
        rest is small.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container, Iterator, Sequence

import numpy as np

from autopar.intra_op.elimination import eliminate
from autopar.intra_op.ilp import solve_ilp
from autopar.intra_op.problem import MemoryRow, Neighbours, Problem, Solution, num_pairs
from autopar.intra_op.time_limit import TimeLimit
from autopar.tuning import TUNING


def polish(
    problem: Problem, found: Solution, limit: TimeLimit, solver: str = "highs", enough: float = -np.inf
) -> Solution:
    """Improve an assignment, neighbourhood by neighbourhood.

    Args:
        problem: Costs in seconds; if it has rows, `found` and the result meet them.
        found: The assignment to begin with.
        limit: Time limit of the solver.
        solver: The solver for what elimination leaves.
        enough: Stop at this objective.
    """
    enough = max(enough, found.bound)
    if not found.choices or found.objective <= enough:
        return found
    of, choices, cost = Neighbours(problem), list(found.choices), found.objective
    for size in TUNING.polish_nodes:
        for _ in range(TUNING.polish_rounds):
            before = cost
            for free in _neighbourhoods(of, size):
                if limit.is_spent or cost <= enough:
                    break
                cost -= _choose_anew(of, choices, free, limit, solver)
            if limit.is_spent or cost <= enough or before - cost <= TUNING.polish_gain * abs(before):
                break
    cost = problem.cost(choices)
    if not cost < found.objective:
        return found
    return dataclasses.replace(found, choices=tuple(choices), objective=cost, bound=min(found.bound, cost))


def exchange(problem: Problem, answers: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The best answer within the problem's rows, after exchanges: connected nodes take their choices from another answer.

    A descent, so that the result need not be the least of its kind; where none of the answers meets the rows, ().
    """
    fitting = [choices for choices in answers if problem.fits(choices)]
    if not fitting:
        return ()
    begun = min(fitting, key=problem.cost)
    of, choices, before = Neighbours(problem), list(begun), None
    while choices != before:
        before = list(choices)
        for other, size in itertools.product(answers, TUNING.exchanged_nodes):
            apart = {node for node, choice in enumerate(choices) if choice != other[node]}
            for nodes in _neighbourhoods(of, size, apart):
                now, changed = _cost_around(of, choices, nodes), list(choices)
                for node in nodes:
                    changed[node] = other[node]
                if _cost_around(of, changed, nodes) < now * (1 - 1e-9) and problem.fits(changed):
                    choices = changed
    return tuple(choices)


def _cost_around(of: Neighbours, choices: Sequence[int], nodes: Sequence[int]) -> float:
    """Cost of some nodes, and of the edges that end at one of them."""
    cost, inside = 0.0, set(nodes)
    for node in nodes:
        cost += of.costs[node].item(choices[node])
        for other, matrix in of.around[node]:
            if other not in inside or node < other:
                cost += matrix.item(choices[node], choices[other])
    return cost


def _neighbourhoods(of: Neighbours, size: int, among: Container[int] | None = None) -> Iterator[list[int]]:
    """Connected sets of about `size` nodes that together cover all, or all `among` these."""
    among = range(len(of.around)) if among is None else among
    seen: set[int] = set()
    for start in range(len(of.around)):
        if start in seen or start not in among:
            continue
        found, queue = {start: None}, [start]
        for node in queue:
            if len(found) >= size:
                break
            for other, _ in of.around[node]:
                if other not in found and other in among and len(found) < size:
                    found[other] = None
                    queue.append(other)
        seen.update(found)
        yield sorted(found)


def _choose_anew(of: Neighbours, choices: list[int], free: Sequence[int], limit: TimeLimit, solver: str) -> float:
    """Give the nodes in `free` their best choices, with all others fixed; `choices` is changed if that is better.

    Returns the decrease of the cost.
    """
    number = {node: k for k, node in enumerate(free)}
    costs, edges = [of.costs[node].copy() for node in free], {}
    for node in free:
        for other, matrix in of.around[node]:
            if other not in number:
                costs[number[node]] += matrix[:, choices[other]]
            elif node < other:
                edges[number[node], number[other]] = matrix
    small = Problem(costs, edges, [_row_of(row, choices, number) for row in of.problem.rows])
    now = tuple(choices[node] for node in free)
    better = _best_within_rows(small, limit, solver) if small.rows else _best(small, now, limit, solver)
    before, after = small.cost(now), small.cost(better) if better else np.inf
    if not after < before * (1 - 1e-9):
        return 0.0
    for node, choice in zip(free, better, strict=True):
        choices[node] = choice
    return before - after


def _best(small: Problem, now: tuple[int, ...], limit: TimeLimit, solver: str) -> tuple[int, ...]:
    """The best choices, where the busiest nodes keep their choice in `now` until elimination leaves a small core."""
    reduced = eliminate(small)
    ways = [reduced]
    while num_pairs(reduced.problem) > TUNING.polish_core:
        core, stay = reduced.problem, reduced.narrow(now)
        weight = [0] * len(core.costs)
        for (u, v), matrix in core.edges.items():
            weight[u] += matrix.size
            weight[v] += matrix.size
        busiest = max(range(len(weight)), key=weight.__getitem__)
        cost = np.full(len(core.costs[busiest]), np.inf)
        cost[stay[busiest]] = core.costs[busiest][stay[busiest]]
        if not np.isfinite(cost[stay[busiest]]):
            return ()
        reduced = eliminate(Problem([cost if n == busiest else c for n, c in enumerate(core.costs)], core.edges))
        ways.append(reduced)
        now = stay
    with limit.running() as seconds:
        answer = solve_ilp(reduced.problem, solver, seconds)
    found = answer.choices
    if not found and reduced.kept:
        return ()
    for way in reversed(ways):
        found = way.expand(found)
    return found


def _best_within_rows(small: Problem, limit: TimeLimit, solver: str) -> tuple[int, ...]:
    if num_pairs(small) > TUNING.polish_pairs:
        return ()
    with limit.running() as seconds:
        return solve_ilp(small, solver, seconds).choices


def _row_of(row: MemoryRow, choices: Sequence[int], number: dict[int, int]) -> MemoryRow:
    """A row restricted to the free nodes: bytes of the others are constant."""
    constant = row.constant_bytes
    bytes_of: dict[int, np.ndarray] = {}
    pairs: dict[tuple[int, int], np.ndarray] = {}
    for node, num_bytes in row.bytes_of.items():
        if node in number:
            bytes_of[number[node]] = bytes_of.get(number[node], 0.0) + num_bytes
        else:
            constant += float(num_bytes[choices[node]])
    for (u, v), matrix in row.pairs.items():
        match u in number, v in number:
            case True, True:
                pairs[number[u], number[v]] = matrix
            case True, False:
                bytes_of[number[u]] = bytes_of.get(number[u], 0.0) + matrix[:, choices[v]]
            case False, True:
                bytes_of[number[v]] = bytes_of.get(number[v], 0.0) + matrix[choices[u]]
            case _:
                constant += float(matrix[choices[u], choices[v]])
    return dataclasses.replace(row, bytes_of=bytes_of, pairs=pairs, constant_bytes=constant)
