"""`Auto()` is never slower, by the same cost model and simulator, than what can be fixed by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.inter_op.chain import balanced_borders
from autopar.inter_op.cut import cut_step
from autopar.search.layer_costs import LayerCosts, submesh_sizes
from autopar.search.progress import silent
from autopar.search.solve_stages import Solved
from tests.small_mlp import train_step

FIXED = [
    *(
        autopar.PipelineParallel(num_stages=n, schedule=s)
        for n in (2, 4)
        for s in ("gpipe", "1f1b", "zb-h1", "interleaved")
    ),
    *(autopar.ThreeD(data=d, tensor=t, pipeline=4 // d // t) for d in (1, 2, 4) for t in (1, 2, 4) if d * t <= 4),
    *(autopar.DataParallel(zero=zero) for zero in (0, 1, 3)),
]


def predicted(cluster, method, rows, width):
    params = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * 8
    batch = {name: jax.ShapeDtypeStruct((rows, width), jnp.float32) for name in ("x", "y")}
    return autopar.parallelize(train_step, cluster=cluster, method=method, batch_argnums=1).plan(params, batch)


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("rate, rows", [(1e9, 512), (12e9, 2048)])
def test_nothing_fixed_by_hand_is_faster(hosts, rate, rows):
    """Where links are slow, stages win, within one host too."""
    device = autopar.Device("d", 1.5e13, memory_bytes=64e9, memory_bytes_per_second=1e12)
    link = autopar.Link(1e-5, rate)
    cluster = autopar.Cluster(hosts=hosts, devices_per_host=4 // hosts, device=device, intra=link, inter=link)
    best = predicted(cluster, autopar.Auto(), rows, 4096)
    assert len(best.stages) > 1
    for method in FIXED:
        try:
            seconds = predicted(cluster, method, rows, 4096).cost.step_seconds
        except autopar.errors.AutoparError:
            continue
        assert best.cost.step_seconds <= seconds * (1 + 1e-6), method


def test_a_stage_is_not_guessed_from_samples_that_divide_otherwise():
    """8 samples over 4 devices say nothing of 2 samples over 4 devices: that is solved when it is asked for."""
    cluster = autopar.Cluster.of("2x4 v100")
    params = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 4
    batch = {name: jax.ShapeDtypeStruct((32, 256), jnp.float32) for name in ("x", "y")}
    planned = autopar.parallelize(train_step, cluster=cluster, method=autopar.ShardParallel(), batch_argnums=1)
    origin = planned.plan(params, batch).origin

    def cut_for(count):
        return cut_step(origin.program, origin.roles, 4, count)

    borders = balanced_borders(cut_for(4).chain, 4)
    options, sizes = autopar.Auto().options(), submesh_sizes(cluster)
    layers = LayerCosts(cut_for, borders, np.ones(4), sizes, (32, 32), (4, 8, 16), cluster, options, Solved(), silent)
    assert not layers.is_guess(4, 4) and not layers.is_guess(4, 8) and layers.is_guess(4, 16)
    before = layers.of(4, 16)
    layers.solve(4, 16)
    solved_for, costs = layers.of(4, 16)
    assert not layers.is_guess(4, 16) and before[0] != solved_for == 16
    assert np.shape([[c is None for c in of_mesh] for of_mesh in costs]) == (len(layers.meshes[4]), 4)
