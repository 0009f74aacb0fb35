"""A rewritten step is searched again only where the search for the step as it was has been good."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import autopar
from autopar.ir.trace.state import find_roles
from autopar.ir.trace.trace import trace_step
from autopar.search import planner
from autopar.search.progress import Anytime, silent
from autopar.search.request import Narrowed, Request
from tests.small_mlp import train_step
from tests.sweep import QUICK, SLOW

ROWS = jax.ShapeDtypeStruct((64, 72), np.float32)
STEP = trace_step(train_step, ([jax.ShapeDtypeStruct((72, 72), np.float32)] * 4, {"x": ROWS, "y": ROWS}))


@pytest.mark.parametrize("cluster", [autopar.Cluster(1, 8, SLOW, QUICK), autopar.Cluster(2, 4, SLOW, QUICK)])
def test_only_the_best_meshes_are_searched_again(cluster, monkeypatch):
    request = Request(STEP, find_roles(STEP, (1,)), cluster, autopar.Auto(steps=1e9))
    _, tried, shown = planner._search(request, Anytime(silent, None))
    assert shown.meshes and len(tried) > 1
    searched, real = [], planner.search_meshes

    def search_meshes(request, meshes, *others):
        searched.extend(meshes)
        real(request, meshes, *others)

    monkeypatch.setattr(planner, "search_meshes", search_meshes)
    coarse, passes = [mesh for mesh in shown.meshes if len(mesh.shape) <= 2], []
    for meshes, stages in ((shown.meshes, False), (coarse[:1], True)):
        searched.clear()
        report = Anytime(silent, None)
        planner._search(dataclasses.replace(request, narrowed=Narrowed(tuple(meshes), stages)), report)
        assert sorted(searched, key=str) == sorted(meshes, key=str)
        passes.append("stages" in dict(report.search().pass_seconds))
    assert passes == [False, cluster.hosts > 1]


@pytest.mark.parametrize("over, kept", [(1.005, False), (0.999, True), (0.9, True)])
def test_a_pipeline_is_held_against_the_best_mesh_as_where_it_is_named(over, kept, monkeypatch):
    """Which is planned if that may make it the faster one. Here it makes it a hundredth faster; `over` the best before."""
    cluster, asked = autopar.Cluster(2, 4, SLOW, QUICK), []
    search = planner._Search(Request(STEP, find_roles(STEP, (1,)), cluster, autopar.Auto()), Anytime(silent, None))
    search.on_meshes()
    before = search.searched.best
    search.stages.best = SimpleNamespace(seconds_for=lambda goal: over * before.step_seconds)

    def search_unaided(request, searched, report):
        asked.append(request)
        faster = 1.0 if kept else 0.99
        searched.results.append(SimpleNamespace(step_seconds=faster * before.step_seconds, mesh=before.mesh))

    monkeypatch.setattr(planner, "search_unaided", search_unaided)
    search.unaided()
    assert (search.stages.best is not None) == kept
    assert len(asked) == (over > 0.9)
