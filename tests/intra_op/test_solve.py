"""Solvers against brute force, on small problems drawn at random."""

import itertools

import numpy as np
import pytest

from autopar.errors import SolverError
from autopar.intra_op import solve as solving
from autopar.intra_op.dual import Ascent
from autopar.intra_op.elimination import _least_between, eliminate
from autopar.intra_op.ilp import solve_ilp
from autopar.intra_op.problem import MemoryRow, Problem, brute_force
from autopar.intra_op.solve import solve


def draw(seed, rows=False, forbidden=0.15, nodes=(2, 7), choices=(1, 5)):
    """A problem of up to six nodes; integer costs, so that ties are frequent."""
    random = np.random.default_rng(seed)
    count = int(random.integers(*nodes))
    problem = Problem([random.integers(0, 10, random.integers(*choices)).astype(float) for _ in range(count)])
    for u in range(count):
        for v in range(u + 1, count):
            if random.random() < 0.7:
                matrix = random.integers(0, 10, (len(problem.costs[u]), len(problem.costs[v]))).astype(float)
                matrix[random.random(matrix.shape) < forbidden] = np.inf
                problem.add_edge(u, v, matrix)
    if rows:
        bytes_of = {u: random.integers(0, 10, len(problem.costs[u])).astype(float) for u in range(count)}
        pairs = {
            (u, v): random.integers(0, 5, (len(problem.costs[u]), len(problem.costs[v]))).astype(float)
            for u in range(count)
            for v in range(u + 1, count)
            if random.random() < 0.3
        }
        problem.rows.append(MemoryRow("row", bytes_of, 5.0 * count, pairs=pairs))
    return problem


@pytest.mark.parametrize("solver", ["highs", "cbc"])
@pytest.mark.parametrize("rows", [False, True])
def test_solve_equals_brute_force(solver, rows):
    for seed in range(25):
        problem = draw(seed, rows)
        wanted, found = brute_force(problem), solve(problem, solver)
        assert found.status == wanted.status, seed
        if wanted.choices:
            assert found.objective == pytest.approx(wanted.objective, abs=1e-9), seed
            assert problem.fits(found.choices)
            assert problem.cost(found.choices) == pytest.approx(found.objective)
            assert found.gap == pytest.approx(0.0, abs=1e-9)


def test_a_gap_that_may_be_left_is_kept():
    gap = 1e-3
    for seed in range(60):
        problem = draw(seed, forbidden=0.1, nodes=(5, 8), choices=(3, 5))
        wanted, found = brute_force(problem), solve(problem, gap=gap)
        assert (found.status == "infeasible") == (not wanted.choices)
        assert found.bound <= wanted.objective + 1e-9, seed
        assert not wanted.choices or found.objective <= wanted.objective * (1 + gap) + 1e-9, seed


def test_a_rough_answer_says_how_rough():
    """Message passing alone: its answer is an assignment, and its bound holds."""
    proved = 0
    for seed in range(60):
        problem = draw(seed, forbidden=0.1, nodes=(5, 8), choices=(3, 5))
        wanted, found = brute_force(problem), solve(problem, gap=solving.ROUGH)
        assert (found.status == "infeasible") == (not wanted.choices)
        if wanted.choices:
            assert problem.cost(found.choices) == pytest.approx(found.objective)
            assert found.bound <= wanted.objective + 1e-9 <= found.objective + 2e-9, seed
            proved += found.gap <= solving.ROUGH
    assert 10 < proved, "often it proves what is asked for"


def test_elimination_is_exact():
    for seed in range(60):
        problem = draw(seed, forbidden=0.3)
        wanted = brute_force(problem)
        reduced = eliminate(problem)
        core = brute_force(reduced.problem)
        assert core.objective + reduced.constant == pytest.approx(wanted.objective), seed
        if wanted.choices:
            assert problem.cost(reduced.expand(core.choices)) == pytest.approx(wanted.objective), seed


def test_a_price_is_paid_for_every_byte():
    problem = draw(3, rows=True)
    for row in problem.rows:
        for choices in itertools.product(*(range(len(c)) for c in problem.costs)):
            if np.isfinite(problem.cost(choices)):
                wanted = problem.cost(choices) + 0.25 * row.used(choices)
                assert problem.priced([row], 0.25).cost(choices) == pytest.approx(wanted)


def test_bounds_hold():
    tight = 0
    for seed in range(60):
        problem = draw(seed, forbidden=0.1, choices=(2, 5))
        wanted = brute_force(problem)
        if not wanted.choices:
            continue
        bounds = Ascent(problem).run(100)
        assert bounds.lower <= wanted.objective + 1e-6 * abs(wanted.objective) + 1e-9, seed
        assert bounds.upper >= wanted.objective - 1e-9, seed
        for node, choice in enumerate(wanted.choices):
            # No choice of the least assignment may be called too expensive.
            assert bounds.excess[node][choice] <= wanted.objective - bounds.lower + 1e-6, seed
        tight += bounds.lower >= wanted.objective - 1e-6
    assert tight > 20


def test_large_cores_are_solved_on_promising_choices(monkeypatch):
    monkeypatch.setattr(solving, "SMALL_CORE", 0)
    monkeypatch.setattr(solving, "PROMISING", 4)
    for seed in range(15):
        problem = draw(seed, forbidden=0.0, nodes=(5, 8), choices=(3, 6))
        wanted, found = brute_force(problem), solve(problem)
        assert found.bound <= wanted.objective + 1e-6
        assert found.objective <= wanted.objective * 1.1
        if found.status == "optimal":
            assert found.objective == pytest.approx(wanted.objective)


def test_same_problem_same_choices():
    assert solve(draw(3)).choices == solve(draw(3)).choices


def test_time_is_up():
    """No time at all: never called optimal without a proof."""
    found = solve_ilp(draw(1, nodes=(6, 7), choices=(4, 5)), seconds=1e-9)
    assert found.status in ("feasible", "infeasible") or found.gap == pytest.approx(0, abs=1e-6)


def test_unknown_solver():
    with pytest.raises(SolverError, match="autopar knows 'highs', 'cbc'"):
        solve_ilp(draw(0), "gurobi")


def test_a_large_problem_is_given_up_only_where_it_cannot_be_better(monkeypatch):
    monkeypatch.setattr(solving, "SMALL_CORE", 0)
    monkeypatch.setattr(solving, "LARGE_CORE", 0)
    given_up = 0
    for seed in range(40):
        problem = draw(seed, forbidden=0.0, nodes=(5, 7), choices=(3, 5))
        problem.costs = [cost + 1.0 for cost in problem.costs]
        least = brute_force(problem).objective
        for known in (0.5 * least, least, 1.1 * least):
            found = solve(problem, known=known)
            assert found.bound <= least * (1 + 1e-9)
            if found.status == "beaten":
                given_up += 1
                assert least >= known * (1 - solving.LARGE_GAP)
            else:
                assert found.objective <= least * (1 + solving.LARGE_GAP)
    assert given_up > 20


def test_folding_takes_the_first_of_the_least():
    random = np.random.default_rng(0)
    for _ in range(20):
        left, right = (random.integers(0, 4, (count, 5)).astype(float) for count in (3, 4))
        least, first = _least_between(left, right)
        table = left[:, None, :] + right[None, :, :]
        assert (least == table.min(axis=2)).all() and (first == table.argmin(axis=2)).all()
