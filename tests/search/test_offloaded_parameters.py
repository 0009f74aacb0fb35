"""Parameters wait in the memory of the hosts where nothing else fits: planned, run, told of, saved."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import autopar
from autopar import Cluster, DataParallel, Link, PipelineParallel, Plan
from tests.ir.rewrite.test_state_on_host import arguments, scanned, train, unrolled
from tests.sweep import check_faithful

DEVICE = autopar.Device("slow", 1e8, 1e9, 1e9, host_bytes_per_second=1e8)
SIZES = {"layers": 12, "width": 32, "rows": 8}


def parallel(method, loss):
    cluster = Cluster.local(jax.devices()[:2], device=DEVICE, intra=Link(1e-7, 1e9, shared_memory=True))
    return autopar.parallelize(train(loss), cluster=cluster, method=method, donate_argnums=())


def of_parameters(share):
    """A memory budget: this part of the bytes of all parameters."""
    return share * SIZES["layers"] * SIZES["width"] ** 2 * 4


def accumulated(**how):
    return DataParallel(num_microbatches=2, **how)


def in_stages(**how):
    return PipelineParallel(num_stages=2, num_microbatches=2, recompute="cheap", **how)


def check_equal(got, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), got, expected)


def on_hosts(state):
    return {x.sharding.memory_kind for x in jax.tree.leaves(state)} == {"pinned_host"}


@pytest.mark.parametrize(
    "make, loss, share",
    [
        (DataParallel, unrolled, 0.9),
        (accumulated, scanned, 4.1),
        (in_stages, scanned, 1.55),
    ],
)
def test_where_nothing_else_fits(make, loss, share, tmp_path):
    """Not even the parameters of the unrolled step fit; the gradients of the scanned one wait for the end of its loop."""
    args, step = arguments(loss, **SIZES), parallel(make(memory_budget_bytes=of_parameters(share)), loss)
    compiled = step.compile(*args)
    check_faithful(compiled)
    plan = compiled.plan
    assert max(plan.cost.peak_bytes) <= of_parameters(share) and plan.cost.host_bytes > 0
    assert len(plan.offloaded) == len(jax.tree.leaves(args[0])) and f"{len(plan.offloaded)} arrays of state" in str(
        plan
    )
    expected = jax.jit(train(loss))
    got, value = compiled(*args)
    want, value_there = expected(*args)
    check_equal((got, value), (want, value_there))
    assert on_hosts(got)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert str(loaded) == str(plan) and loaded.offloaded == plan.offloaded
    check_equal(step.compile(*args, plan=loaded)(got, args[1]), expected(want, args[1]))


def test_they_go_into_checkpoints_and_are_evaluated(tmp_path):
    checkpoint = pytest.importorskip("autopar.checkpoint")
    args = arguments(unrolled, **SIZES)
    step = parallel(DataParallel(memory_budget_bytes=of_parameters(0.9)), unrolled)
    state, _ = step(*args)
    checkpoint.save(tmp_path, state, 1).wait()
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    restored = checkpoint.restore(tmp_path, like, compiled=step)
    assert on_hosts(restored)
    check_equal(jax.tree.map(np.asarray, restored), jax.tree.map(np.asarray, state))
    evaluate = autopar.follow(lambda state, batch: unrolled(state[0], batch), step)
    check_equal(evaluate(state, args[1]), unrolled([np.asarray(w) for w in state[0]], args[1]))
