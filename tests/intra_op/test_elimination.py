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


@pytest.mark.parametrize("seed", range(20))
def test_dominated_choices_are_dropped(seed):
    """Of a node with too many neighbours to fold: those that another choice beats whatever the neighbours choose."""
    rng = np.random.default_rng(seed)
    count, forbidden = 9, 0.1
    tables = [rng.integers(0, 4, (count, size)).astype(float) for size in (2, 3, 4)]
    for table in tables:
        table[rng.random(table.shape) < forbidden] = np.inf
    cost = rng.integers(0, 4, count).astype(float)
    problem = Problem([cost, *(np.zeros(table.shape[1]) for table in tables)])
    problem.edges |= {(0, 1 + k): table for k, table in enumerate(tables)}

    def beats(j: int, i: int) -> bool:
        def most(table: np.ndarray) -> float:
            return max(
                (a - b for a, b in zip(*table[[j, i]].tolist(), strict=True) if a < np.inf or b < np.inf),
                default=-np.inf,
            )

        return bool(float(cost[j] - cost[i]) + sum(map(most, tables)) <= 0)

    def is_dropped(i: int) -> bool:
        return any(beats(j, i) and (j < i or not beats(i, j)) for j in range(count) if j != i)

    reduced = eliminate(problem, keep=(1, 2, 3))
    assert reduced.alive_of(0).tolist() == [i for i in range(count) if not is_dropped(i)]


def test_a_node_between_two_with_equal_rows_is_folded():
    """Rows that are equal are computed once, and stand where they stood."""
    rng = np.random.default_rng(0)
    (left, right), cost = rng.random((2, 20, 50)), rng.random(50)
    left, right = left[rng.integers(0, 20, 60)], right[rng.integers(0, 20, 50)]
    problem = Problem([np.zeros(60), np.zeros(50), cost], {(0, 2): left, (1, 2): right})
    reduced = eliminate(problem, keep=(0, 1))
    expected = (left[:, None] + (right + cost)).min(axis=2)
    np.testing.assert_array_equal(reduced.problem.edges[0, 1], expected)
