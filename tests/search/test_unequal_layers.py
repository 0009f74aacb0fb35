"""Nets without equal layers, and models of a demo's size, are planned in few and large pieces of work: counted, not timed."""

from __future__ import annotations

import math
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import autopar
from autopar.intra_op import instance
from autopar.intra_op import solve as solving
from autopar.intra_op.problem import num_pairs
from autopar.intra_op.trws import Ascent
from autopar.search import meshes
from tests.tuned import tune

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import scale  # noqa: E402
import unet  # noqa: E402

UNET = unet.Config(width=32, multiples=(1, 2), blocks=1, attention=(1,), groups=8, pixels=16, batch=64)


@pytest.fixture
def work(monkeypatch):
    """What planning does: rounds of message passing and their calls and edges, pairs for the ILP, meshes, programs."""
    counted, passed, solved, sharded = Counter(), Ascent._round, solving.solve_ilp, meshes.shard_on
    lowered = instance.lower

    def one_round(ascent):
        counted["rounds"] += 1
        counted["calls"] += sum(1 + len(level.out) for level in ascent.layout.levels)
        counted["edges"] += len(ascent.problem.edges)
        passed(ascent)

    def solve_ilp(problem, *how):
        counted["pairs"] += num_pairs(problem)
        return solved(problem, *how)

    def shard_on(request, mesh, *how):
        counted["meshes"] += 1
        return sharded(request, mesh, *how)

    def lower(*how):
        counted["written"] += 1
        return lowered(*how)

    monkeypatch.setattr(instance, "lower", lower)
    monkeypatch.setattr(Ascent, "_round", one_round)
    monkeypatch.setattr(solving, "solve_ilp", solve_ilp)
    monkeypatch.setattr(meshes, "shard_on", shard_on)
    return counted


def planned(step, *args, cluster="1x8 h100", **how):
    parallel = autopar.parallelize(
        step, cluster=autopar.Cluster.of(cluster), method=autopar.Auto(**how), batch_argnums=1
    )
    return parallel.plan(*args)


def test_messages_of_a_net_of_different_layers_are_passed_many_at_once(work):
    """Level by level, tables of one width in one call; one call each would be minutes where layers are many."""
    plan = planned(*unet.make_step(UNET))
    assert len(plan.origin.program.jaxpr.eqns) > 5000 and plan.cost.optimality_gap <= 0.01
    assert work["edges"] > 10 * work["calls"] > 0
    assert work["rounds"] < 100 and work["pairs"] < 5_000, "what messages leave open is small"


def test_a_mesh_that_cannot_win_ends_early(work, monkeypatch):
    """It is bounded by the plan on the mesh before, and no program is written for it."""
    step, *args = unet.make_step(replace(UNET, multiples=(1,), attention=(), batch=512))
    written = []
    for doubted in (0, math.inf):  # problems of so few pairs are solved to see what the clock says
        tune(monkeypatch, meshes, small_mesh_pairs=doubted)
        work.clear()
        tried = planned(step, *args, steps=10**9).cost.search.tried
        assert any(text.startswith("at least ") for _, text in tried) == (not doubted)
        written.append(work["written"])
    assert 0 < written[0] < written[1]


def test_small_models_are_given_up_at_once(work):
    """A digits CNN: a second axis is tried, since it wins; a third is not, nor are stages, and little is left to solve."""
    step, *args = scale.digits_cnn()
    plan = planned(step, *args)
    assert plan.cost.step_seconds < 2e-3
    assert work["meshes"] <= 2 and work["rounds"] < 300 and work["pairs"] < 1_000
    assert not any("stage" in name for name, _ in plan.cost.search.tried)
    work.clear()
    planned(step, *args, steps=10**12)
    assert work["meshes"] > 2, "in a training so long, more repays"
