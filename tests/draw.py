"""Draw a legal plan at random: the strongest test of partitioning.

In:     a decision graph, what is allowed, a seed.
Out:    one choice per node.
Method: every decision is drawn on its own, so that unlikely shardings meet; only where something may not be sent (arrays
        in host memory) are choices made to agree, by solving for random costs. Most choices split something, so each
        decision draws first what it would rather do: keep things whole, hold partial sums, split as far as it can, or any
        of all. Then tables are whole and sliced where they are read, and casts and products meet sums that are not added
        up yet.
"""

from __future__ import annotations

import numpy as np

from autopar.intra_op.costs import build_problem
from autopar.intra_op.graph import Graph, Node
from autopar.intra_op.restrict import Allowed
from autopar.intra_op.solve import solve
from autopar.mesh import Device, Sharding

_LEANINGS = ("any", "whole", "partial", "split")


def draw_choices(graph: Graph, seed: int, allowed: Allowed | None = None) -> tuple[int, ...]:
    """Choices of all nodes, drawn with a fixed seed.

    Args:
        graph: Decisions.
        seed: Of the draw.
        allowed: Restrictions to keep.
    """
    random = np.random.default_rng(seed)
    problem = build_problem(graph, Device(), range(len(graph.nodes)), allowed.masks if allowed else None)
    liked = [_liked(node, _LEANINGS[random.integers(len(_LEANINGS))]) for node in graph.nodes]
    problem.costs = [
        np.where(np.isinf(cost), np.inf, random.random(len(cost)) + ~likes)
        for cost, likes in zip(problem.costs, liked, strict=True)
    ]
    problem.edges = {
        key: np.where(np.isinf(matrix), np.inf, 0.0) for key, matrix in problem.edges.items() if np.isinf(matrix).any()
    }
    solution = solve(problem)
    assert solution.status != "infeasible", "whole on every device is always legal"
    return solution.choices


def _liked(node: Node, leaning: str) -> np.ndarray:
    """Which choices of a node are of a kind."""
    shardings = [s.operands + s.results for s in node.strategies] or [(s,) for s in node.shardings]
    match leaning:
        case "whole":
            return np.array([not any(map(_num_split, own)) and not _partial(own) for own in shardings])
        case "partial":
            return np.array([_partial(own) for own in shardings])
        case "split":
            counts = np.array([sum(map(_num_split, own)) for own in shardings])
            return counts == counts.max()
        case _:
            return np.ones(len(shardings), bool)


def _num_split(sharding: Sharding) -> int:
    return sum(map(len, sharding.dims))


def _partial(shardings: tuple[Sharding, ...]) -> bool:
    return any(s.partial for s in shardings)
