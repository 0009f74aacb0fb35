"""Shrunk problems have the optimum of the whole, and the way back to it."""

import numpy as np
import pytest

from autopar.intra_op.elimination import eliminate
from autopar.intra_op.problem import Problem
from tests.brute_force import brute_force


def drawn(seed: int, num_nodes: int, density: float) -> Problem:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 4, num_nodes)
    problem = Problem([rng.integers(0, 9, size).astype(float) for size in sizes])
    for u in range(num_nodes):
        for v in range(u + 1, num_nodes):
            if v == u + 1 or rng.random() < density:
                problem.edges[u, v] = rng.integers(0, 9, (sizes[u], sizes[v])).astype(float)
    return problem


@pytest.mark.parametrize("seed", range(12))
def test_same_optimum(seed):
    problem = drawn(seed, 7, 0.3)
    reduced = eliminate(problem)
    core = brute_force(reduced.problem)
    choices = reduced.expand(core.choices)
    assert core.objective + reduced.constant == pytest.approx(brute_force(problem).objective)
    assert problem.cost(choices) == pytest.approx(core.objective + reduced.constant)


def test_nothing_is_left_of_a_chain():
    reduced = eliminate(drawn(0, 8, 0.0))
    assert not reduced.kept and not reduced.problem.costs


@pytest.mark.parametrize("seed", range(4))
def test_kept_nodes_stay(seed):
    """With all of their choices that may be part of an optimum."""
    problem = drawn(seed, 6, 0.4)
    reduced = eliminate(problem, keep={1, 4})
    assert {1, 4} <= set(reduced.kept)
    core = brute_force(reduced.problem)
    assert core.objective + reduced.constant == pytest.approx(brute_force(problem).objective)
    best = brute_force(problem).choices
    assert reduced.alive_of(1)[reduced.narrow(best)[reduced.kept.index(1)]] in range(len(problem.costs[1]))
