"""`Auto()` is never slower, by the same cost model and simulator, than what can be fixed by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.inter_op.borders import balanced_borders
from autopar.inter_op.cut import cut_step
from autopar.inter_op.stage_plan import peak_bytes_here
from autopar.search.candidates import Estimates, Rounds, equal_candidates, find_candidates
from autopar.search.layer_costs import LayerCosts, submesh_sizes
from autopar.search.pipeline import least_seconds, once_seconds
from autopar.search.progress import silent
from autopar.search.solve_stages import Solved, Terms
from autopar.tuning import TUNING
from tests.small_mlp import train_step

FIXED = [
    *(autopar.PipelineParallel(num_stages=2, schedule=s) for s in ("1f1b", "interleaved")),
    *(autopar.PipelineParallel(num_stages=4, schedule=s) for s in ("gpipe", "zb-h1")),
    *(autopar.ThreeD(data=d, tensor=t, pipeline=4 // d // t) for d, t in ((1, 2), (2, 1), (1, 4), (2, 2))),
    *(autopar.DataParallel(zero=zero) for zero in (1, 3)),
]
"""Each number of stages, schedule and degree, in few of the ways to cross them: every other one on each machine."""


def predicted(cluster, method, rows, width):
    params = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * 8
    batch = {name: jax.ShapeDtypeStruct((rows, width), jnp.float32) for name in ("x", "y")}
    return autopar.parallelize(train_step, cluster=cluster, method=method, batch_argnums=1).plan(params, batch)


@pytest.mark.parametrize("hosts, rate, rows", [(1, 1e9, 512), (2, 12e9, 2048)])
def test_nothing_fixed_by_hand_is_faster(hosts, rate, rows):
    """Where links are slow, stages win, within one host too."""
    device = autopar.Device("d", 1.5e13, memory_bytes=64e9, memory_bytes_per_second=1e12)
    link = autopar.Link(1e-5, rate)
    cluster = autopar.Cluster(hosts=hosts, devices_per_host=4 // hosts, device=device, intra=link, inter=link)
    best = predicted(cluster, autopar.Auto(), rows, 4096)
    assert len(best.stages) > 1
    for method in FIXED[hosts - 1 :: 2]:
        try:
            seconds = predicted(cluster, method, rows, 4096).cost.step_seconds
        except autopar.errors.AutoparError:
            continue
        assert best.cost.step_seconds <= seconds * (1 + 1e-6), method


@pytest.fixture(scope="module")
def layers_on():
    """Costs of the layers of a small MLP on two hosts of four, and the stages that they were read off, for a memory budget."""
    cluster = autopar.Cluster.of("2x4 v100")
    params = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 4
    batch = {name: jax.ShapeDtypeStruct((32, 256), jnp.float32) for name in ("x", "y")}
    planned = autopar.parallelize(train_step, cluster=cluster, method=autopar.ShardParallel(), batch_argnums=1)
    origin = planned.plan(params, batch).origin

    def cut_for(count):
        return cut_step(origin.program, origin.roles, 4, count)

    def layers(budget=None, sharded=True):
        borders, solved = balanced_borders(cut_for(4).chain, 4), Solved()
        options, sizes = autopar.Auto(memory_budget_bytes=budget).options(), submesh_sizes(cluster)
        given = cut_for, borders, np.ones(4), sizes, (32, 32), (4, 8, 16), Terms(cluster, options, solved), silent
        costs = LayerCosts(*given)
        costs.shard_on(sizes if sharded else ())
        return costs, solved, cluster

    return layers


def test_a_stage_is_not_guessed_from_samples_that_divide_otherwise(layers_on):
    """8 samples over 4 devices say nothing of 2 samples over 4 devices: that is solved when it is asked for."""
    layers, _, _ = layers_on()
    assert not layers.is_guess(4, 4) and not layers.is_guess(4, 8) and layers.is_guess(4, 16)
    before = layers.of(4, 16)
    layers.solve(4, 16)
    solved_for, costs = layers.of(4, 16)
    assert not layers.is_guess(4, 16) and before[0] != solved_for == 16
    assert np.shape([[c is None for c in of_mesh] for of_mesh in costs]) == (len(layers.meshes[4]), 4)


def test_layers_are_sharded_only_on_submeshes_on_which_a_pipeline_may_win(layers_on):
    """Until then they take what their kernels take at least, which is no more than they do."""
    layers, solved, cluster = layers_on(sharded=False)
    told = Estimates(layers, np.zeros(4), cluster, np.inf, Rounds(), 4)
    assert find_candidates(told, (4,), 4, 0.0) and not solved.known, "nothing can win"
    alone = {(size, count): layers.of(size, count)[1] for size in layers.meshes for count in (4, 8, 16)}
    known = min(c.least for c in find_candidates(told, (4,), 4, 1e-12))
    few = find_candidates(told, (4,), 4, 0.98 * known)
    assert solved.known and all(not layers.is_bound(size) for c in few if c.may_beat(0.98 * known) for size in c.sizes)
    everywhere = find_candidates(told, (4,), 4, np.inf)
    assert not any(layers.is_bound(size) for size in layers.meshes) and min(c.least for c in everywhere) >= known
    for size in layers.meshes:
        solved_for, of_meshes = layers.of(size, 4)
        for of_mesh, bounds in zip(of_meshes, alone[size, solved_for], strict=True):
            for cost, bound in zip(of_mesh, bounds, strict=True):
                least = cost[0].work_seconds - cost[0].exposed_seconds + cost[0].fixed_seconds
                assert 0 < bound[0].work_seconds <= least * (1 + 1e-9)


def test_layers_are_sharded_within_memory_only_where_that_may_win(layers_on):
    """As if memory were without end they are solved first, and are no slower so; what cannot win even then stays so."""
    _, solved, _ = layers_on()
    budget = 0.9 * max(peak_bytes_here(stage) for stage in solved.known.values())
    layers, solved, cluster = layers_on(budget)
    beyond = [size for size in layers.meshes if layers.is_beyond(size, 4)]
    assert beyond and all(layers.is_guess(size, 4) for size in beyond)
    before, few = layers.of(beyond[0], 4)[1], len(solved.known)
    told = Estimates(layers, np.zeros(4), cluster, budget, Rounds(), 4)
    assert find_candidates(told, (4,), 4, 0.0) and len(solved.known) == few, "nothing can win"
    while layers.is_guess(beyond[0], 4):  # for so many microbatches, and then within memory
        layers.refine(beyond[0], 4)
    after = layers.of(beyond[0], 4)[1]
    assert not layers.is_beyond(beyond[0], 4) and len(solved.known) > few
    for endless, within in zip(before, after, strict=True):
        for one, other in zip(endless, within, strict=True):
            assert other is None or one[0].work_seconds <= other[0].work_seconds * (1 + TUNING.layer_gap)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_no_pipeline_takes_less_than_its_microbatches(schedule):
    """One goes through all stages before the slowest begins and after it ends."""
    cluster = autopar.Cluster.of("1x4 v100")
    for count in (1, 4):
        method = autopar.PipelineParallel(num_stages=4, num_microbatches=count, schedule=schedule)
        plan = predicted(cluster, method, 64, 256)
        least = least_seconds([*map(once_seconds, plan.origin.pipeline.stages)], count)
        assert 0 < least <= plan.cost.step_seconds * (1 + 1e-9)


@pytest.mark.parametrize("rows, width, rate", [(4096, 4096, 1e12), (1024, 1024, 1e11), (8192, 2048, 1e13)])
def test_no_pipeline_is_faster_than_its_bound_by_kernels(rows, width, rate):
    """Where layers were not sharded, a pipeline is left out by its kernels alone: with a small doubt that is a bound."""
    device = autopar.Device("d", 1.5e13, memory_bytes=64e9, memory_bytes_per_second=1e12)
    link = autopar.Link(1e-7, rate)
    cluster = autopar.Cluster(2, 4, device, link, link)
    planned = predicted(cluster, autopar.DataParallel(), rows, width).origin

    def cut_for(count):
        return cut_step(planned.program, planned.roles, 8, count)

    borders, options = balanced_borders(cut_for(4).chain, 8), autopar.Auto().options()
    work, sizes, counts = np.ones(len(borders)), submesh_sizes(cluster), (8, 16)
    layers = LayerCosts(cut_for, borders, work, sizes, (rows, rows), counts, Terms(cluster, options, Solved()), silent)
    assert layers.has_bounds()
    estimates = Estimates(layers, np.zeros(len(borders)), cluster, np.inf, Rounds(1, TUNING.bubble_left, True), 8)
    tightest = 0.0
    for count in counts:
        for bound in equal_candidates(estimates, count):
            assert bound.is_bound
            for schedule in ("1f1b", "interleaved", "zb-h1"):
                if schedule == "interleaved" and len(bound.sizes) > 4:
                    continue
                how = autopar.PipelineParallel(num_stages=len(bound.sizes), num_microbatches=count, schedule=schedule)
                seconds = predicted(cluster, how, rows, width).cost.step_seconds
                assert seconds >= (1 - TUNING.kernels_doubt) * bound.least, (bound, schedule)
                tightest = max(tightest, bound.least / seconds)
    assert tightest > 0.6, "and some are near"
