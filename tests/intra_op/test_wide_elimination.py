"""Tables over the choices of many neighbours, against brute force."""

import numpy as np
import pytest

from autopar.intra_op.ilp import solve_ilp
from autopar.intra_op.problem import Problem
from autopar.intra_op.wide_elimination import elimination_order, solve_by_tables
from tests.brute_force import brute_force
from tests.intra_op.test_solve import draw, frustrated


def ladder(seed: int, length: int, choices: int) -> Problem:
    """Two chains with rungs: long, and three nodes wide."""
    random = np.random.default_rng(seed)
    problem = Problem([random.random(choices) for _ in range(2 * length)])
    for node in range(2 * length):
        for other in (node + 1, node + 2) if node % 2 == 0 else (node + 2,):
            if other < 2 * length:
                problem.add_edge(node, other, random.random((choices, choices)))
    return problem


@pytest.mark.parametrize("forbidden", [0.0, 0.15, 0.6])
def test_equals_brute_force(forbidden):
    for seed in range(25):
        problem = draw(seed, forbidden=forbidden, nodes=(1, 8))
        wanted, found = brute_force(problem), solve_by_tables(problem)
        assert found.status == wanted.status, seed
        if wanted.choices:
            assert problem.cost(found.choices) == pytest.approx(wanted.objective), seed
            assert found.gap == 0


def test_wide_tables():
    """Whose last dims are one; every node has every other for a neighbour."""
    problem = frustrated(0, nodes=9, choices=3)
    assert solve_by_tables(problem).objective == pytest.approx(brute_force(problem).objective)


def test_a_long_narrow_problem_takes_small_tables():
    problem = ladder(0, 200, 3)
    assert sorted(elimination_order(problem, 400 * 27)) == list(range(400))
    assert solve_by_tables(problem, 400 * 27).objective == pytest.approx(solve_ilp(problem).objective)


def test_tables_that_are_too_large_are_not_made():
    assert elimination_order(frustrated(0, nodes=9, choices=3), 3.0**9 - 1) is None
    assert solve_by_tables(frustrated(0, nodes=9, choices=3), 3.0**9 - 1) is None
