"""Undoes ties: makes the answer of a tied problem one of the problem as it stands.

In:     `Sharded`, whose equal parts share their choices.
Out:    `Sharded`, each node by itself: its answer costs no more, and its gap is that of all ways to choose.
Method: every node begins with its class's choice. Message passing bounds the untied problem from below; what exceeds the
        room between the bounds is in no better answer, and in the rest a better one is looked for (`solve.py`). Layers
        that are alike are eliminated at the price of one, so that this takes little more than the tied problem did.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from autopar.intra_op.costs import build_problem
from autopar.intra_op.problem import Solution
from autopar.intra_op.read_off import Sharded, read_off
from autopar.intra_op.solve import pass_messages, solve
from autopar.intra_op.time_limit import TimeLimit
from autopar.mesh import Device
from autopar.tuning import TUNING


def untie(
    sharded: Sharded,
    device: Device,
    donated: Sequence[bool],
    fits: Callable[[Sharded], bool],
    solver: str,
    limit: TimeLimit,
) -> Sharded:
    """Let every node choose for itself.

    Args:
        sharded: The program, on its mesh.
        device: Rates of one device.
        donated: For each input, whether its memory may be reused.
        fits: Whether a sharded program keeps the memory budget.
        solver: Of the ILP.
        limit: What it may use of time.

    Returns:
        The better one; the same choices where none is, with the bound of the untied problem; the program as it was given,
        where it is as far as that goes.
    """
    graph, count = sharded.graph, len(sharded.graph.nodes)
    alone = list(range(count))
    # Of rows only those of the tied problem are known: the answer within them stays.
    if len(sharded.problem.costs) == count or sharded.problem.rows or _untied_pairs(sharded) > TUNING.untied_pairs:
        return sharded
    problem = build_problem(graph, device, alone, sharded.allowed.masks, sharded.exposure)
    answer = solve(problem, solver, limit, TUNING.large_gap, start=sharded.choices)
    before = problem.cost(sharded.choices)
    same = Solution(sharded.choices, before, before, "feasible", sharded.solution.solver).bounded(answer.bound)
    kept = dataclasses.replace(sharded, problem=problem, class_of=tuple(alone), solution=same)
    if not answer.choices or answer.objective >= before * (1 - 1e-6):
        return kept
    better = read_off(
        graph,
        answer.choices,
        alone,
        problem,
        answer,
        sharded.allowed,
        device,
        donated,
        exposure=sharded.exposure,
    )
    return better if fits(better) and better.step_seconds <= sharded.step_seconds else kept


def proved(sharded: Sharded) -> Sharded:
    """The same answer; where it was found two axes at a time, with a bound of the problem as a whole by message passing."""
    if len(sharded.graph.mesh.shape) < 3 or sharded.solution.gap <= TUNING.rough_gap:
        return sharded
    found = pass_messages(sharded.problem, sharded.solution.choices)
    solution = sharded.solution.bounded(max(sharded.solution.bound, found.bound))
    return dataclasses.replace(sharded, solution=solution)


def _untied_pairs(sharded: Sharded) -> int:
    nodes = sharded.graph.nodes
    return sum(nodes[edge.source].num_choices * nodes[edge.target].num_choices for edge in sharded.graph.edges)
