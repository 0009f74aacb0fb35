"""Searches without proofs, against trying all assignments."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from autopar.intra_op.searches import SEARCHES, search
from autopar.intra_op.solve import solve
from autopar.options import Searcher
from tests.brute_force import brute_force
from tests.intra_op.test_solve import draw, frustrated

CLOSE = {"random": 1.6, "greedy": 1.8, "beam": 1.05, "bfs": 1.0, "halving": 1.4, "mcmc": 1.15, "mcts": 1.4}
"""How far from the least cost each is on average, at most."""


@pytest.mark.parametrize("name", SEARCHES)
def test_searches_come_near(name):
    ratios = []
    for seed in range(6):
        problem = frustrated(seed, nodes=5)
        choices, least = search(problem, name, 4000), brute_force(problem).objective
        assert len(choices) == 5 and problem.cost(choices) >= least
        assert choices == search(problem, name, 4000), "the same again"
        ratios.append(problem.cost(choices) / least)
    assert np.mean(ratios) <= CLOSE[name]


def test_breadth_first_with_memory_is_exact_where_nothing_is_cut():
    for seed in range(10):
        problem = draw(seed, forbidden=0.0)
        assert problem.cost(search(problem, "bfs", 10**6)) == brute_force(problem).objective


@pytest.mark.parametrize("name", SEARCHES)
def test_each_is_a_solver(name):
    for seed in range(4):
        problem = frustrated(seed)
        found, least = solve(problem, name), brute_force(problem).objective
        assert found.solver == name and found.status in ("feasible", "optimal")
        assert found.objective == problem.cost(found.choices) >= least
        assert found.bound <= least * (1 + 1e-9)


def test_what_a_search_cannot_find_the_ilp_does():
    """Greedy runs into what is forbidden: no problem is called infeasible for that."""
    for seed in range(12):
        problem = draw(seed, forbidden=0.3, nodes=(5, 7), choices=(2, 4))
        assert (solve(problem, "greedy").status == "infeasible") == (not brute_force(problem).choices)


def test_rows_are_kept_by_the_ilp():
    for seed in range(3):
        problem = draw(seed, rows=True)
        found, least = solve(problem, "mcmc"), brute_force(problem)
        assert bool(found.choices) == bool(least.choices)
        assert not found.choices or (problem.fits(found.choices) and found.objective == pytest.approx(least.objective))


def test_options_name_them_all():
    assert set(get_args(Searcher)) == set(SEARCHES)
