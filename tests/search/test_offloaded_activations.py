"""Activations wait in the memory of the hosts where memory binds and that is faster: planned, run, told of."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import Auto, Cluster, DataParallel, Link, PipelineParallel, Plan
from autopar.errors import InfeasibleError
from tests.inter_op.test_offloaded_residuals import block, scanned, train, unrolled
from tests.sweep import check_faithful

LAYERS, WIDTH, BATCH = 5, 8, 512
DEVICE = autopar.Device("slow", 1e8, 1e9, 1e9, host_bytes_per_second=1e8)


def arguments(rows=BATCH):
    rng = np.random.default_rng(0)
    params = {name: jnp.asarray(rng.normal(size=(LAYERS, WIDTH, WIDTH)) / 3, jnp.float32) for name in ("down", "up")}
    return params, jnp.asarray(rng.normal(size=(rows, WIDTH)), jnp.float32)


def parallel(method, loss, device=DEVICE):
    cluster = Cluster.local(jax.devices()[:4], device=device, intra=Link(1e-7, 1e9))
    return autopar.parallelize(train(loss), cluster=cluster, method=method, donate_argnums=())


def least_without(make, loss, device=DEVICE):
    """The least memory that the step was planned in with everything on the devices."""
    peak = float("inf")
    while True:
        try:
            plan = parallel(make(memory_budget_bytes=peak - 1, offload="never"), loss, device).plan(*arguments())
        except InfeasibleError as error:
            assert 'Or offload="auto"' in str(error)
            return peak
        assert not plan.offloaded_activations and not plan.cost.host_bytes
        peak = max(plan.cost.peak_bytes)


def zero(**how):
    return DataParallel(zero=3, **how)


def accumulated(**how):
    return DataParallel(num_microbatches=2, **how)


def in_stages(**how):
    return PipelineParallel(num_stages=2, num_microbatches=2, recompute="cheap", **how)


@pytest.mark.parametrize(
    "make, loss",
    [
        (DataParallel, unrolled),
        (zero, scanned),
        (accumulated, scanned),
        (in_stages, unrolled),
        (in_stages, scanned),
    ],
)
def test_where_nothing_else_fits(make, loss, tmp_path):
    budget = 0.9 * least_without(make, loss)
    args, step = arguments(), parallel(make(memory_budget_bytes=budget), loss)
    compiled = step.compile(*args)
    check_faithful(compiled)
    plan = compiled.plan
    assert plan.offloaded_activations and not plan.offloaded
    assert max(plan.cost.peak_bytes) <= budget and plan.cost.host_bytes > 0
    assert "wait there" in str(plan) and "activation" in str(plan) and "nothing on the hosts" in str(plan)
    expected = jax.jit(train(loss))(*args)
    check_equal(compiled(*args), expected)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.offloaded_activations == plan.offloaded_activations and str(loaded) == str(plan)
    check_equal(step.compile(*args, plan=loaded)(*args), expected)


def check_equal(got, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), got, expected)


@pytest.mark.parametrize("make", [DataParallel, in_stages, Auto])
def test_not_where_memory_does_not_bind(make):
    plan = parallel(make(), scanned).plan(*arguments())
    assert not plan.offloaded_activations and not plan.cost.host_bytes
    assert not any("on the hosts" in what for what, _ in plan.alternatives)


def test_recomputation_that_the_user_asks_for_is_no_sign_of_too_little_memory():
    method = PipelineParallel(num_stages=2, num_microbatches=2, recompute="all")
    plan = parallel(method, unrolled, dataclasses.replace(DEVICE, host_bytes_per_second=1e12)).plan(*arguments())
    assert not plan.offloaded_activations and not plan.alternatives


def centred(params, x):
    """Each layer reads statistics of the whole batch: no microbatches."""
    for k in range(LAYERS):
        x = block((x - x.mean(0)) / (1 + x.var(0)), jax.tree.map(lambda w, k=k: w[k], params))
    return jnp.mean(x**2)


def test_auto_offloads_what_no_accumulation_makes_fit():
    cluster = Cluster.local(jax.devices()[:1], device=DEVICE)

    def planned(**how):
        return autopar.parallelize(train(centred), cluster=cluster, method=Auto(**how)).plan(*arguments(rows=509))

    budget = 0.6 * max(planned().cost.peak_bytes)
    with pytest.raises(InfeasibleError, match='Or offload="auto"'):
        planned(memory_budget_bytes=budget, offload="never")
    plan = planned(memory_budget_bytes=budget)
    assert plan.offloaded_activations and max(plan.cost.peak_bytes) <= budget


@pytest.mark.parametrize("rate, is_offloaded", [(1e9, True), (1e6, False)])
def test_beside_recomputation_the_faster_is_taken(rate, is_offloaded):
    device = dataclasses.replace(DEVICE, host_bytes_per_second=rate)

    def planned(**how):
        method = PipelineParallel(num_stages=2, num_microbatches=2, **how)
        return parallel(method, unrolled, device).plan(*arguments())

    free = planned()
    budget = 0.8 * max(free.cost.peak_bytes)
    never, auto = (planned(memory_budget_bytes=budget, offload=how) for how in ("never", "auto"))
    assert max(auto.cost.peak_bytes) <= budget
    assert any(stage.recomputed.level for stage in never.stages)
    assert bool(auto.offloaded_activations) is is_offloaded and not never.offloaded_activations
    if is_offloaded:
        assert auto.cost.step_seconds < never.cost.step_seconds
        assert free.cost.compute_seconds < auto.cost.compute_seconds < never.cost.compute_seconds
        assert "activations" in str(auto.diff(never))
    else:
        assert auto.cost.step_seconds == never.cost.step_seconds
