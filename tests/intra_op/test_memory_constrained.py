"""Memory budgets on hand-built problems: rows by demand, and a price on bytes, against trying all assignments."""

import numpy as np
import pytest

from autopar.intra_op import memory_constrained
from autopar.intra_op.memory_constrained import BytePrices, solve_constrained
from autopar.intra_op.problem import MemoryRow, Problem
from autopar.intra_op.solve import solve
from tests.brute_force import brute_force
from tests.intra_op.test_solve import draw
from tests.tuned import tune


def test_rows_are_added_until_none_is_broken():
    problem = Problem([np.array([0.0, 1.0]), np.array([0.0, 1.0])])
    sizes = {0: np.array([8.0, 1.0]), 1: np.array([8.0, 1.0])}

    def broken(choices):
        used = sum(sizes[n][k] for n, k in enumerate(choices))
        return [MemoryRow("all", sizes, 9.0)] if used > 9 else []

    found = solve_constrained(problem, broken)
    assert found.objective == 1.0 and sorted(found.choices) == [0, 1]
    problem.rows.clear()
    assert solve_constrained(problem, lambda choices: [MemoryRow("all", sizes, 1.0)]).status == "infeasible"


@pytest.mark.parametrize("small", [0, 10_000], ids=["price", "rows"])
def test_budgets_against_brute_force(small, monkeypatch):
    tune(monkeypatch, memory_constrained, rows_core=small)
    feasible, solved, least = 0, 0, 0
    for seed in range(60):
        problem = draw(seed, rows=True, forbidden=0.0, nodes=(4, 7), choices=(3, 5))
        wanted, rows = brute_force(problem), problem.rows

        def broken(choices, rows=rows):
            return [row for row in rows if row.used(choices) > row.budget_bytes]

        found = solve_constrained(Problem(problem.costs, problem.edges), broken)
        feasible += bool(wanted.choices)
        if found.choices:
            solved += 1
            assert problem.fits(found.choices)
            assert found.bound <= wanted.objective * (1 + 1e-9) <= found.objective * (1 + 1e-6)
            least += found.objective <= wanted.objective * (1 + 1e-6)
    assert feasible > 40
    assert solved == feasible
    assert least == feasible if small else least > feasible // 2


def test_a_price_that_was_found_is_where_the_next_problem_begins(monkeypatch):
    """Of the same program with other costs: fewer prices are tried, and what is found fits as well."""
    tune(monkeypatch, memory_constrained, rows_core=0)
    tried = {"first": 0, "next": 0}
    for seed in range(30):
        problem, prices = draw(seed, rows=True, forbidden=0.0, nodes=(4, 7), choices=(3, 5)), BytePrices()
        rows = problem.rows

        def broken(choices, rows=rows):
            return [row for row in rows if row.used(choices) > row.budget_bytes]

        for name, costs in (("first", problem.costs), ("next", [1.01 * cost for cost in problem.costs])):

            def solve_one(*args, name=name, **kwargs):
                tried[name] += 1
                return solve(*args, **kwargs)

            found = solve_constrained(Problem(costs, problem.edges), broken, solve_one=solve_one, prices=prices)
            assert not found.choices or problem.fits(found.choices)
    assert tried["next"] < 0.8 * tried["first"], tried


def test_what_cannot_beat_a_known_plan_ends_early(monkeypatch):
    """At some price on bytes it is proved that no assignment is as good as one known from elsewhere."""
    tune(monkeypatch, memory_constrained, rows_core=0)
    pruned = by_price = 0
    for seed in range(30):
        problem = draw(seed, rows=True, forbidden=0.0, nodes=(4, 7), choices=(3, 5))
        wanted, rows = brute_force(problem), problem.rows
        endless = solve(Problem(problem.costs, problem.edges)).objective

        def broken(choices, rows=rows):
            return [row for row in rows if row.used(choices) > row.budget_bytes]

        for share in () if not wanted.choices else (0.5, 1.0, 1.5) if seed < 4 else (1.0,):
            known = share * wanted.objective
            found = solve_constrained(Problem(problem.costs, problem.edges), broken, known=known)
            if found.status == "pruned":
                pruned += 1
                by_price += endless < known * (1 - 1e-6)
                assert known * (1 - 1e-5) <= found.bound <= wanted.objective * (1 + 1e-9)
            else:
                assert found.choices and problem.fits(found.choices)
    assert pruned > 6 and by_price > 0


def test_no_time_is_spent_on_what_is_far_over(monkeypatch):
    """Rows of a large problem that say so are believed; where they may be wrong by a little, what takes least is looked at."""
    sizes = {0: np.array([8.0, 4.0])}
    for small, budget, looks in ((10_000, 1.0, 3), (-1, 1.0, 1), (-1, 3.0, 3)):
        tune(monkeypatch, memory_constrained, rows_core=small)
        seen = []

        def broken(choices, budget=budget, seen=seen):
            seen.append(choices)
            return [MemoryRow("all", sizes, budget)]

        assert solve_constrained(Problem([np.array([0.0, 1.0])]), broken).status == "infeasible"
        assert len(seen) == looks
