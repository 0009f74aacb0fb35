"""Planning takes no longer than what it may win repays: counted by the size of problems, never by the clock."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import autopar
from autopar.intra_op import shard as sharding
from autopar.intra_op import solve as solving
from autopar.intra_op.problem import Problem, num_pairs, planning_seconds
from autopar.intra_op.solve import solve
from autopar.intra_op.time_limit import TimeLimit
from autopar.search import meshes
from autopar.search.request import Request
from tests.intra_op.test_exposure import sharded_of
from tests.intra_op.test_solve import draw, frustrated
from tests.small_mlp import train_step
from tests.sweep import QUICK, SLOW
from tests.tuned import tune
from tests.without_tables import without_tables

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import scale  # noqa: E402

CLUSTER = autopar.Cluster(1, 8, SLOW, QUICK)


@pytest.fixture
def solved(monkeypatch):
    """Pairs of what the ILP solver was called with."""
    found, real = [], solving.solve_ilp

    def solve_ilp(problem, *given):
        found.append(num_pairs(problem))
        return real(problem, *given)

    without_tables(monkeypatch)
    monkeypatch.setattr(solving, "solve_ilp", solve_ilp)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_what_bounds_leave_open_is_left_where_the_rest_takes_longer(solved, seed):
    problem = frustrated(seed)
    exact = solve(problem)
    assert exact.gap == 0 and sum(solved) > 0
    solved.clear()
    quick = solve(problem, seconds=TimeLimit(60.0, steps=1e-6))
    assert sum(solved) == 0, "of a cost of seconds a millionth is won"
    assert quick.bound <= exact.objective <= quick.objective == pytest.approx(problem.cost(quick.choices))
    solved.clear()
    assert solve(problem, seconds=TimeLimit(60.0, steps=1e6)).objective == pytest.approx(exact.objective)
    assert sum(solved) > 0


def test_a_stage_of_auto_is_planned_for_as_many_steps():
    """A small step within memory was planned as one stage, too, for 45 s, since a pipeline by name is planned thoroughly."""
    request = Request(None, None, CLUSTER, autopar.Auto(steps=100))
    staged = autopar.PipelineParallel(num_stages=1, num_microbatches=4)
    assert request.options_of(staged).repaying_steps == 400, "each microbatch gains"
    assert dataclasses.replace(request, method=staged).options.repaying_steps == math.inf
    assert dataclasses.replace(request, thorough=True).options_of(staged).repaying_steps == math.inf


def test_a_further_axis_multiplies_choices():
    problem = draw(3)
    on_two = Problem(
        [np.zeros(len(cost) ** 2) for cost in problem.costs],
        {ends: np.zeros((matrix.shape[0] ** 2, matrix.shape[1] ** 2)) for ends, matrix in problem.edges.items()},
    )
    assert planning_seconds(problem, 2, 1) == pytest.approx(planning_seconds(on_two))
    assert planning_seconds(on_two, 3, 2) > planning_seconds(on_two)


def plan(method):
    array = jax.ShapeDtypeStruct((64, 72), np.float32)
    parallel = autopar.parallelize(train_step, cluster=CLUSTER, method=method, batch_argnums=(1,))
    return parallel.plan([jax.ShapeDtypeStruct((72, 72), np.float32)] * 4, {"x": array, "y": array})


@pytest.mark.parametrize("steps", [1e-9, 1e9])
def test_meshes_are_tried_as_far_as_they_repay(steps):
    planned = plan(autopar.Auto(steps=steps))
    told = [text for mesh, text in planned.alternatives if mesh in ("(x=2, y=4)", "(x=8)")]
    assert any("longer to plan than" in text for text in told) == (steps < 1)
    if steps < 1:
        assert plan(autopar.ShardParallel(mesh_shape=(2, 4))).cost.optimality_gap < 1e-3, (
            "who names a mesh gets its best"
        )


def test_another_axis_is_tried_for_all_that_is_open():
    """Of what shares of equal size would win beside the best plan on one axis, a second one may win all."""
    alone = sharded_of(plan(autopar.ShardParallel(mesh_shape=(8,))))
    takes = planning_seconds(alone.problem, 2, 1)
    steps = takes / (alone.step_seconds - alone.shared_seconds)
    for worth, tried in ((0.9, False), (1.1, True)):
        told = dict(plan(autopar.Auto(steps=worth * steps)).alternatives)
        assert ("longer to plan than" not in told.get("(x=2, y=4)", "")) == tried


def test_a_third_axis_of_a_small_program_is_tried_where_it_repays():
    """It wins less than the second did; where that won next to nothing, or a descent is quick, see `test_meshes.py`."""
    (step, *args), told = scale.digits_cnn(), []
    for steps in (10**4, 10**7):
        method = autopar.Auto(steps=steps)
        planned = autopar.parallelize(step, cluster=autopar.Cluster.local(), method=method, batch_argnums=1).plan(*args)
        told.append(dict(planned.alternatives).get("(x=2, y=2, z=2)", ""))
    assert "longer to plan" in told[0] and "left out" not in told[1]


def test_equal_problems_are_solved_once(monkeypatch):
    """Where nothing hides behind kernels, no exposure changes a price: no further turn of the clock solves the same again."""
    asked, real = [], sharding.solve

    def solve(problem, *given, **more):
        asked.append((*map(bytes, problem.costs), *map(bytes, problem.edges.values())))
        return real(problem, *given, **more)

    monkeypatch.setattr(sharding, "solve", solve)
    assert SLOW.achieved.overlap == 0
    plan(autopar.ShardParallel())
    assert len(asked) > 3 and len(asked) == len(set(asked))


def test_ties_of_a_small_program_are_undone_whatever_that_wins(monkeypatch):
    """Where it takes less than half a second. Of others, and on other meshes, they are where that repays."""
    asked, real = [], meshes.untie

    def untie(sharded, *how):
        asked.append(sharded.graph.mesh.shape)
        return real(sharded, *how)

    monkeypatch.setattr(meshes, "untie", untie)
    automatic = plan(autopar.Auto(steps=1e-9))
    assert asked == [automatic.mesh.shape]
    tune(monkeypatch, meshes, untied_seconds=0.0)
    plan(autopar.Auto(steps=1e-9))
    assert len(asked) == 1
