"""Unties an answer: refines the solution of a tied problem in the problem without ties.

In:     `Sharded`, in which nodes of one class share their choice.
Out:    `Sharded` without ties: its answer costs no more, and its gap is relative to all assignments.
Method: the untied problem is solved (`solve.py`) from the tied answer. Equal layers are eliminated at the price of one, so
        that this takes little longer than the tied problem did.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from autopar.intra_op.costs import build_problem
from autopar.intra_op.lower import lower
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
        sharded: The sharded program.
        device: The device.
        donated: Per input, whether its memory may be reused.
        fits: Whether a sharded program meets the memory budget.
        solver: The ILP solver.
        limit: Its time limit.

    Returns:
        A better program; or the same one, with the bound of the untied problem; or `sharded` itself, if it is not tied, has
        memory rows, or is too large.
    """
    graph, count = sharded.graph, len(sharded.graph.nodes)
    alone = list(range(count))
    # Memory rows are known for the tied problem only, so an answer that needed them stays.
    if len(sharded.problem.costs) == count or sharded.problem.rows or _untied_pairs(sharded) > TUNING.untied_pairs:
        return sharded
    problem = build_problem(graph, device, alone, sharded.allowed.masks, sharded.exposure)
    answer = solve(problem, solver, limit, TUNING.large_gap, start=sharded.choices, content=True)
    before = problem.cost(sharded.choices)
    kept = dataclasses.replace(sharded, class_of=tuple(alone)).repriced(problem, answer.bound, sharded.exposure)
    if not answer.choices or answer.objective >= before * (1 - 1e-6):
        return kept
    body = lower(graph, answer.choices, sharded.body.bucket)
    how = sharded.allowed, device, donated, body, sharded.exposure
    better = read_off(graph, answer.choices, alone, problem, answer, *how)
    return better if fits(better) and better.step_seconds <= sharded.step_seconds else kept


def proved(sharded: Sharded) -> Sharded:
    """Bound an answer that was found two axes at a time by message passing over the whole problem; return others as is."""
    if len(sharded.graph.mesh.shape) < 3 or sharded.solution.gap <= TUNING.rough_gap:
        return sharded
    found = pass_messages(sharded.problem, sharded.solution.choices)
    solution = sharded.solution.bounded(max(sharded.solution.bound, found.bound))
    return dataclasses.replace(sharded, solution=solution)


def _untied_pairs(sharded: Sharded) -> int:
    nodes = sharded.graph.nodes
    return sum(nodes[edge.source].num_choices * nodes[edge.target].num_choices for edge in sharded.graph.edges)
