"""Large-neighbourhood search on small problems, against trying all assignments."""

from __future__ import annotations

import numpy as np

from autopar.intra_op import polish as polishing
from autopar.intra_op.polish import _neighbourhoods, polish
from autopar.intra_op.problem import Neighbours, Problem, Solution
from autopar.intra_op.time_limit import TimeLimit
from tests.brute_force import brute_force
from tests.intra_op.test_solve import draw, frustrated
from tests.tuned import tune


def worst(problem):
    """A bad assignment that fits, and nothing known of it."""
    random = np.random.default_rng(0)
    for _ in range(1000):
        choices = tuple(int(random.integers(len(cost))) for cost in problem.costs)
        if np.isfinite(problem.cost(choices)) and problem.fits(choices):
            return Solution(choices, problem.cost(choices), 0.0, "feasible", "drawn")
    return None


def test_a_neighbourhood_of_all_is_exact():
    for seed in range(8):
        problem = frustrated(seed)
        found = polish(problem, worst(problem), TimeLimit(60.0))
        assert found.objective == problem.cost(found.choices) == brute_force(problem).objective


def test_rows_are_kept():
    better = 0
    for seed in range(20):
        problem = draw(seed, rows=True, forbidden=0.0, nodes=(4, 6), choices=(3, 5))
        begun = worst(problem)
        if begun is None:
            continue
        found = polish(problem, begun, TimeLimit(60.0))
        assert problem.fits(found.choices) and found.objective <= begun.objective
        assert found.objective == brute_force(problem).objective
        better += found.objective < begun.objective
    assert better > 10


def test_small_neighbourhoods_help_too(monkeypatch):
    tune(monkeypatch, polishing, polish_nodes=(3,))
    for seed in range(8):
        problem = frustrated(seed, nodes=7)
        begun = worst(problem)
        found = polish(problem, begun, TimeLimit(60.0))
        assert brute_force(problem).objective <= found.objective < begun.objective


def test_neighbourhoods_hold_every_node_and_hang_together():
    problem = draw(5, nodes=(6, 7))
    found = list(_neighbourhoods(Neighbours(problem), 3))
    assert {n for some in found for n in some} == set(range(len(problem.costs)))
    assert all(len(some) == 1 or any((u, v) in problem.edges for v in some for u in some) for some in found)


def test_without_time_nothing_changes():
    problem, limit = frustrated(1), TimeLimit(10.0)
    limit.left = 0.0
    begun = worst(problem)
    assert polish(problem, begun, limit).choices == begun.choices


def test_what_is_proved_is_left_alone():
    found = Solution((0, 0), 3.0, 3.0, "optimal", "any")
    assert polish(Problem([np.zeros(2), np.zeros(2)]), found, TimeLimit(1.0)) is found
