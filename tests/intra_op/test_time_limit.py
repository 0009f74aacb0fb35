"""One time limit for all solves of one question."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest

import autopar
from autopar.intra_op import shard as sharding
from autopar.intra_op import solve as solving
from autopar.intra_op import time_limit
from autopar.intra_op.problem import Solution
from autopar.intra_op.solve import solve
from autopar.intra_op.time_limit import TimeLimit
from tests.brute_force import brute_force
from tests.intra_op.test_solve import draw, frustrated
from tests.small_mlp import train_step
from tests.sweep import QUICK, SLOW
from tests.tuned import tune
from tests.without_tables import without_tables


@pytest.fixture
def limits(monkeypatch):
    """Time limits that the solver was called with; each call works 10 seconds."""
    found, real = [], solving.solve_ilp

    def solve_ilp(problem, solver, seconds, gap, start=()):
        found.append(seconds)
        return real(problem, solver, 60.0, gap, start)

    without_tables(monkeypatch)
    monkeypatch.setattr(time_limit, "Work", lambda: types.SimpleNamespace(seconds=10.0, begun=7.0))
    monkeypatch.setattr(solving, "solve_ilp", solve_ilp)
    return found


def hard(seed):
    """A problem that neither elimination nor message passing solves: its linear relaxation costs less than any answer."""
    return frustrated(seed)


def test_what_is_left_is_for_the_next(limits):
    limit = TimeLimit(25.0)
    for seed in range(4):
        solve(hard(seed), seconds=limit)
    assert limits == [25.0, 15.0, 5.0], "the fourth is not begun"
    assert limit.is_spent


def test_without_time_message_passing_answers(limits):
    limit = TimeLimit(10.0)
    limit.left = 0.0
    for seed in range(10):
        problem = hard(seed)
        found, least = solve(problem, seconds=limit), brute_force(problem)
        assert limits == [], "no solver is begun"
        assert found.choices and found.objective == pytest.approx(problem.cost(found.choices))
        assert found.bound <= least.objective + 1e-9 and found.objective <= 1.5 * least.objective


def test_nothing_is_begun_once_planning_is_to_end(limits, monkeypatch):
    monkeypatch.setattr(time_limit.time, "monotonic", lambda: 7.0)
    limit = TimeLimit(30.0, ends=9.0)
    assert limit.repays(1.0, 1.0) and not limit.is_over
    with limit.running() as seconds:
        assert seconds == 2.0
    with limit.half(), limit.running() as seconds:
        assert limit.left == 10.0 and seconds == 1.5, (
            "half of what the last solve left; but a solver gets a twentieth of all"
        )
    assert limit.left == 10.0 and limit.ends == 9.0
    over = TimeLimit(60.0, ends=7.0)
    assert over.is_spent and not over.repays(1.0, 0.0)
    assert solve(hard(0), seconds=over).choices and not limits


def test_rows_are_kept_without_time(limits):
    """Message passing knows no memory rows: the solver gets a little time all the same."""
    limit = TimeLimit(10.0)
    limit.left = -3.0
    for seed in range(5):
        problem = draw(seed, rows=True)
        found, least = solve(problem, seconds=limit), brute_force(problem)
        assert found.objective == pytest.approx(least.objective)
    assert set(limits) <= {0.5}


def test_time_in_which_others_have_the_processor_does_not_count(monkeypatch):
    clock, processor = iter((0.0, 40.0)), iter((5.0, 7.0))
    monkeypatch.setattr(time_limit.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(time_limit, "_processor_seconds", lambda: next(processor))
    limit = TimeLimit(10.0)
    with limit.running():
        pass
    assert limit.left == 8.0


@pytest.mark.parametrize("answers", ["nothing", "something bad"])
def test_what_the_solver_had_no_time_for_message_passing_finds(monkeypatch, answers):
    def solve_ilp(problem, solver, seconds, gap, start=()):
        if answers == "nothing":
            return Solution((), np.inf, np.inf, "infeasible", solver)
        worst = tuple(int(np.argmax(cost)) for cost in problem.costs)
        return Solution(worst, problem.cost(worst), 0.0, "feasible", solver)

    without_tables(monkeypatch)
    monkeypatch.setattr(solving, "solve_ilp", solve_ilp)
    feasible = 0
    for seed in range(10):
        problem = hard(seed)
        found, least = solve(problem), brute_force(problem)
        assert found.objective <= 1.5 * least.objective and 0 < found.bound <= least.objective + 1e-9
        assert found.status == "feasible" or found.objective == pytest.approx(least.objective)
        feasible += found.status == "feasible"
    assert feasible > 5


def test_known_plans_share_the_limit(limits, monkeypatch):
    """Data parallelism is compared with, and takes no time of its own."""
    tune(monkeypatch, sharding, known_far=-1.0)  # as if small collectives had changed the cost
    array = jax.ShapeDtypeStruct((64, 72), np.float32)
    method = autopar.ShardParallel(mesh_shape=(2, 4), solver_seconds=15.0)
    plan = autopar.parallelize(
        train_step, cluster=autopar.Cluster(1, 8, SLOW, QUICK), method=method, batch_argnums=(1,)
    ).plan([jax.ShapeDtypeStruct((72, 72), np.float32)] * 4, {"x": array, "y": array})
    assert plan.cost.optimality_gap < 1e-3
    assert limits[0] == 15.0 and set(limits[1:]) <= {5.0, 0.75}, "the others have next to nothing left to choose"
