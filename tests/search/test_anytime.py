"""Planning ends at any time with the best plan so far: when its seconds are over, or when somebody presses Ctrl-C."""

from __future__ import annotations

import math
import sys
import time

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import Auto, Cluster, Device, Link, ShardParallel
from autopar.errors import InfeasibleError, NoPlanFoundError
from autopar.intra_op import solve as solving
from autopar.search.planner import make_plan
from autopar.search.progress import Anytime, silent
from tests.without_tables import without_tables

CLUSTER = Cluster.of("2x2 h100")


@pytest.fixture(scope="module")
def traced(make_step, types):
    return make_step(Auto(), CLUSTER)._roles(types(num_layers=2, batch=64), {})


@pytest.fixture(scope="module")
def full(traced):
    return make_plan(*traced, CLUSTER, Auto())


def test_the_limit_ends_it(traced, full):
    plan = make_plan(*traced, CLUSTER, Auto(planning_seconds=1e-9))
    assert plan.cost.search.ended_early == "planning_seconds=1e-09 were over"
    assert "ended early" in str(plan) and len(plan.cost.search.tried) < len(full.cost.search.tried)
    assert plan.cost.step_seconds >= full.cost.step_seconds


def test_there_is_a_plan_however_short_the_time(traced):
    assert make_plan(*traced, CLUSTER, ShardParallel(planning_seconds=1e-9)).cost.step_seconds > 0


def test_ctrl_c_at_a_terminal_takes_the_best_so_far(traced, monkeypatch):
    def report(text, done=None, best=math.inf, gap=math.nan):
        if math.isfinite(best):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_plan(*traced, CLUSTER, Auto(), report)  # in a log, it ends all
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pytest.warns(UserWarning, match="planning was stopped"):
        plan = make_plan(*traced, CLUSTER, Auto(), report)
    assert plan.cost.search.ended_early == "it was stopped" and plan.cost.step_seconds > 0


def test_ctrl_c_without_a_plan_ends_all(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pytest.raises(KeyboardInterrupt), Anytime(silent, None).one_pass("meshes", lambda: False):
        raise KeyboardInterrupt


def test_what_was_tried(full):
    search = full.cost.search
    assert not search.ended_early and search.planned and [name for name, _ in search.pass_seconds][0] == "meshes"
    assert {*search.planned, *search.pruned, *search.failed} == set(search.tried)
    assert str(search).startswith(f"{len(search.planned)} planned, ")


def momentum_step(state, batch):
    params, momentum = state

    def loss_fn(params):
        x = batch
        for p in params:
            x = jnp.tanh(x @ p)
        return jnp.mean(x**2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return (jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum), loss


def within(budget, method=ShardParallel, seconds=None, **settings):
    """A plan of three layers on one mesh, whose best plan takes 311,312 bytes."""
    toy, link = Device("toy", 1e12, 80e9, 1e12), Link(1e-6, 1e10)
    method = method(memory_budget_bytes=budget, planning_seconds=seconds, offload="never", **settings)
    parallel = autopar.parallelize(momentum_step, cluster=Cluster(1, 4, toy, link, link), method=method)
    weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 3
    return parallel.plan((weights, weights), jax.ShapeDtypeStruct((256, 64), jnp.float32))


@pytest.fixture
def solves(monkeypatch):
    """The solves that were begun; each takes a second, and nothing else takes time."""
    begun, real = [], solving.solve_ilp

    def solve_ilp(problem, solver, seconds, gap, start=()):
        begun.append(seconds)
        return real(problem, solver, 60.0, gap, start)

    without_tables(monkeypatch)
    monkeypatch.setattr(solving, "solve_ilp", solve_ilp)
    monkeypatch.setattr(time, "monotonic", lambda: float(len(begun)))
    return begun


def test_it_ends_within_one_mesh(solves):
    """Within memory a mesh takes many solves: once the time is over, what is found by then is taken."""
    free = within(170_000, mesh_shape=(2, 2))
    all_solves = len(solves)
    solves.clear()
    plan = within(170_000, mesh_shape=(2, 2), seconds=2.0)
    assert len(solves) <= 4 < all_solves
    assert max(plan.cost.peak_bytes) <= 170_000 and plan.cost.search.ended_early == "planning_seconds=2 were over"
    assert plan.cost.step_seconds >= free.cost.step_seconds and 0 < plan.cost.optimality_gap < 1


def test_what_was_not_found_in_time_is_said(solves):
    """No further mesh, number of microbatches or pipeline is begun, and nothing is offloaded instead."""
    with pytest.raises(NoPlanFoundError, match="no sharding was found in time") as refused:
        within(130_000, Auto, 1e-9)
    assert len(solves) < 10 and "raise planning_seconds=" in refused.value.do
    assert 130_000 < refused.value.needed_bytes < 311_312
    with pytest.raises(InfeasibleError, match="at least") as proved:  # that takes no time
        within(100_000, Auto, 1e-9)
    assert not isinstance(proved.value, NoPlanFoundError)
