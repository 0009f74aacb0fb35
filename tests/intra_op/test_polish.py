"""Large-neighbourhood search on small problems, against trying all assignments."""

from __future__ import annotations

import numpy as np

from autopar.intra_op import polish as polishing
from autopar.intra_op.polish import _neighbourhoods, exchange, polish
from autopar.intra_op.problem import MemoryRow, Neighbours, Problem, Solution
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


def test_layers_take_turns_with_what_is_dear_and_small():
    """One price gives equal layers equal choices; within the budget half of them may have the cheap one. Their choices are
    exchanged together: within one layer a mixture costs more than either."""
    layers, apart = 6, np.array([[0.0, 9.0], [9.0, 0.0]])
    costs = [np.array([1.0, 2.0])] * 2 * layers
    edges = {(2 * k, 2 * k + 1): apart for k in range(layers)}
    bytes_of = {node: np.array([4.0, 1.0]) for node in range(2 * layers)}
    problem = Problem(costs, edges, [MemoryRow("all", bytes_of, 30.0 + 1)])
    cheap, small = (0,) * 2 * layers, (1,) * 2 * layers
    found = exchange(problem, [cheap, small])
    assert problem.fits(found) and problem.cost(found) == brute_force(problem).objective == 2 * layers + 6
    problem.rows.append(MemoryRow("less", bytes_of, 5.0))
    assert exchange(problem, [cheap, small]) == ()


def test_exchanges_keep_rows_and_lose_nothing():
    better = 0
    for seed in range(40):
        problem = draw(seed, rows=True, forbidden=0.0, nodes=(4, 7), choices=(3, 5))
        random = np.random.default_rng(seed)
        answers = [tuple(int(random.integers(len(cost))) for cost in problem.costs) for _ in range(4)]
        fitting, found = [one for one in answers if problem.fits(one)], exchange(problem, answers)
        assert bool(found) == bool(fitting)
        if fitting:
            least = min(map(problem.cost, fitting))
            assert problem.fits(found) and brute_force(problem).objective <= problem.cost(found) <= least
            assert all(choice in {one[node] for one in answers} for node, choice in enumerate(found))
            better += problem.cost(found) < least
    assert better > 15, better
