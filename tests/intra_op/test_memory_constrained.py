"""Memory budgets on hand-built problems: rows by demand, and a price on bytes, against trying all assignments."""

import dataclasses
import math

import numpy as np
import pytest

from autopar.intra_op import memory_constrained
from autopar.intra_op.memory_constrained import Learnt, solve_constrained
from autopar.intra_op.problem import MemoryRow, Problem
from autopar.intra_op.solve import solve
from autopar.intra_op.time_limit import TimeLimit
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
        problem, learnt = draw(seed, rows=True, forbidden=0.0, nodes=(4, 7), choices=(3, 5)), Learnt()
        rows = problem.rows

        def broken(choices, rows=rows):
            return [row for row in rows if row.used(choices) > row.budget_bytes]

        for name, costs in (("first", problem.costs), ("next", [1.01 * cost for cost in problem.costs])):

            def solve_one(*args, name=name, **kwargs):
                tried[name] += 1
                return solve(*args, **kwargs)

            found = solve_constrained(Problem(costs, problem.edges), broken, solve_one=solve_one, learnt=learnt)
            assert not found.choices or problem.fits(found.choices)
    assert tried["next"] < 0.8 * tried["first"], tried


def test_the_next_problem_begins_with_the_rows_of_the_one_before(monkeypatch):
    """Of the same program with other costs: fewer problems are solved, and the answer is the least, as before."""
    solved = {"first": 0, "next": 0}
    for seed in range(20):
        problem, learnt = draw(seed, rows=False, forbidden=0.0, nodes=(4, 7), choices=(3, 5)), Learnt()
        sizes = np.random.default_rng(seed)
        moments = [{n: sizes.integers(1, 9, len(cost)) for n, cost in enumerate(problem.costs)} for _ in range(6)]
        rows = [MemoryRow(str(k), moment, 5.0 * len(moment)) for k, moment in enumerate(moments)]

        def broken(choices, rows=rows):
            return [row for row in rows if row.used(choices) > row.budget_bytes][:1]

        for name, costs in (("first", problem.costs), ("next", [1.01 * cost for cost in problem.costs])):

            def counted(*args, name=name, **kwargs):
                solved[name] += 1
                return solve(*args, **kwargs)

            monkeypatch.setattr(memory_constrained, "solve", counted)
            found = solve_constrained(Problem(costs, problem.edges), broken, learnt=learnt)
            wanted = brute_force(Problem(costs, problem.edges, rows))
            assert bool(found.choices) == bool(wanted.choices)
            assert not wanted.choices or found.objective <= wanted.objective * (1 + 1e-6)
    assert solved["next"] < 0.8 * solved["first"], solved


def test_rows_that_overestimate_the_next_problem_are_dropped():
    """Rows describe the program that they were read from: what they forbid in another may fit."""
    sizes = {0: np.array([8.0, 1.0])}
    learnt = Learnt(rows=[MemoryRow("of another program", {0: np.array([8.0, 16.0])}, 4.0)])
    found = solve_constrained(
        Problem([np.array([0.0, 1.0])]),
        lambda choices: [MemoryRow("all", sizes, 4.0)] if sizes[0][choices[0]] > 4 else [],
        learnt=learnt,
    )
    assert found.choices == (1,) and [row.label for row in learnt.rows] == ["all"]


def test_many_answers_that_cost_the_same_are_not_forbidden_one_by_one(monkeypatch):
    """Each row knows only the places where its own answer converts: what fits is looked for below the budgets."""
    items, places = 8, 3
    costs = [np.array([1.0] * places + [1.001])] * items
    large, budget = 4.0, 2.5 * items

    def sizes(choices, seen):
        return {n: np.where(np.arange(places + 1) == places, 1.0, large * seen(n, k)) for n, k in enumerate(choices)}

    def broken(choices):
        used = sum(1.0 if k == places else large for k in choices)
        here = sizes(choices, lambda n, k: np.arange(places + 1) == k)
        return [MemoryRow("where it converts", here, budget)] if used > budget else []

    solved = []

    def counted(*args, **kwargs):
        solved.append(args)
        return solve(*args, **kwargs)

    monkeypatch.setattr(memory_constrained, "solve", counted)
    found = solve_constrained(Problem(costs), broken, gap=1e-2)
    assert found.choices and not broken(found.choices)
    assert found.status == "feasible" and items <= found.bound <= found.objective <= 1.01 * items
    assert len(solved) < 20, "with each of them forbidden alone, there would be thousands"


def test_cutting_planes_are_as_many_as_are_allowed(monkeypatch):
    """Every answer but the dearest is forbidden only once it is seen: the first few show that this leads nowhere soon."""
    costs, solved = [np.arange(1.0, 13.0)], []

    def broken(choices):
        used = np.arange(12) == choices[0]
        return [MemoryRow(f"answer {choices[0]}", {0: used.astype(float)}, 0.5)] if choices[0] < 11 else []

    def counted(*args, **kwargs):
        solved.append(args)
        return solve(*args, **kwargs)

    def nothing(search, gap):
        return dataclasses.replace(search.base, choices=(), status="infeasible")

    monkeypatch.setattr(memory_constrained, "solve", counted)
    monkeypatch.setattr(memory_constrained._Search, "by_price", nothing)
    assert solve_constrained(Problem(costs), broken).choices == (11,)
    assert len(solved) >= 11
    solved.clear()
    found = solve_constrained(Problem(costs), broken, num_planes=3)
    assert len(solved) <= 4 and (found.status == "infeasible" or not broken(found.choices))


def test_a_short_training_takes_what_prices_find(monkeypatch):
    """The least answer within rows takes many solves; where it repays none, only problems without such an answer get them."""
    cut, by_steps, planes = memory_constrained._Search.cut, {}, 0

    def counted(*args):
        nonlocal planes
        planes += 1
        return cut(*args)

    monkeypatch.setattr(memory_constrained._Search, "cut", counted)
    for steps in (math.inf, 1e-9):
        planes, found = 0, []
        for seed in range(40):
            problem = draw(seed, rows=True, forbidden=0.0, nodes=(4, 7), choices=(3, 5))

            def broken(choices, rows=problem.rows):
                return [row for row in rows if row.used(choices) > row.budget_bytes]

            limit = TimeLimit(60.0, steps)
            found.append(solve_constrained(Problem(problem.costs, problem.edges), broken, seconds=limit))
            assert not found[-1].choices or problem.fits(found[-1].choices)
        by_steps[steps] = (
            planes,
            [bool(one.choices) for one in found],
            sum(one.objective for one in found if one.choices),
        )
    (thorough, fits, least), (short, fits_too, seconds) = by_steps.values()
    assert short < 0.5 * thorough and fits_too == fits and least < seconds < 1.05 * least


@pytest.mark.parametrize("small", [0, 10_000], ids=["price", "rows"])
def test_what_cannot_beat_a_known_plan_ends_early(small, monkeypatch):
    """At some price on bytes, or within some rows, no assignment is as good as one known from elsewhere."""
    tune(monkeypatch, memory_constrained, rows_core=small)
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


TAKING_TURNS = {node: np.array([10.0, 0.0]) for node in (0, 1)}, {node: np.array([0.0, 10.0]) for node in (0, 1)}
"""Bytes at two moments: two layers with equal choices fit only if they choose differently, and no price tells them to."""


@pytest.mark.parametrize(
    "known, may_send_less, finds", [(np.inf, False, True), (2.1, False, False), (np.inf, True, False)]
)
def test_what_no_price_makes_fit_is_mixed_by_an_ilp_only_where_nothing_else_may_do(
    monkeypatch, known, may_send_less, finds
):
    """Not if a plan is known that it can hardly beat, and not before smaller messages were tried."""
    tune(monkeypatch, memory_constrained, rows_core=0)
    rows = [MemoryRow(str(k), sizes, 10.0) for k, sizes in enumerate(TAKING_TURNS)]

    def broken(choices):
        return [row for row in rows if row.used(choices) > row.budget_bytes]

    problem = Problem([np.array([1.0, 1.01])] * 2, {(0, 1): np.zeros((2, 2))})
    found = solve_constrained(
        problem, broken, seconds=TimeLimit(60.0, 1e-6), known=known, may_send_less=lambda: may_send_less
    )
    assert (found.status == "feasible") is finds and bool(found.choices) is finds
