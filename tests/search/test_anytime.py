"""Planning ends at any time with the best plan so far: when its seconds are over, or when somebody presses Ctrl-C."""

from __future__ import annotations

import math
import sys

import pytest

from autopar import Auto, Cluster, ShardParallel
from autopar.search.planner import make_plan
from autopar.search.progress import Anytime, silent

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
