"""Draw a legal plan at random: the strongest test of partitioning.

In:     a decision graph, what is allowed, a seed.
Out:    one choice per node.
Method: every decision is drawn on its own, so that unlikely shardings meet; only where a loop may not communicate are
        choices made to agree, by solving for random costs.
"""

from __future__ import annotations

import numpy as np

from autopar.intra_op.costs import build_problem
from autopar.intra_op.graph import Graph
from autopar.intra_op.restrict import Allowed
from autopar.intra_op.solve import solve
from autopar.mesh import Device


def draw_choices(graph: Graph, seed: int, allowed: Allowed | None = None) -> tuple[int, ...]:
    """Choices of all nodes, drawn with a fixed seed.

    Args:
        graph: Decisions.
        seed: Of the draw.
        allowed: Restrictions to keep.
    """
    random = np.random.default_rng(seed)
    problem = build_problem(graph, Device(), range(len(graph.nodes)), allowed.masks if allowed else None)
    problem.costs = [np.where(np.isinf(cost), np.inf, random.random(len(cost))) for cost in problem.costs]
    problem.edges = {
        key: np.where(np.isinf(matrix), np.inf, 0.0) for key, matrix in problem.edges.items() if np.isinf(matrix).any()
    }
    solution = solve(problem)
    assert solution.status != "infeasible", "whole on every device is always legal"
    return solution.choices
