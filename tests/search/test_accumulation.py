"""`Auto` accumulates gradients where memory binds, and is then no worse than any method that a user could name."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import InfeasibleError
from autopar.intra_op.exposure import Exposure, show
from autopar.search.accumulation import _to_beat
from autopar.search.meshes import Searched
from autopar.search.request import Request
from autopar.tuning import TUNING
from tests.planned_mlp import CLUSTER, arguments, train_step

FAST = autopar.Link(1e-6, 1e9)
QUICK = dataclasses.replace(CLUSTER, devices_per_host=4, intra=FAST, inter=FAST)  # stages can win nothing here

BATCH, WIDTH, LAYERS = 512, 32, 3
HANDS = [
    *(
        autopar.DataParallel(zero=z, num_microbatches=m, memory_budget_bytes=None)
        for z in (0, 1, 3)
        for m in (1, 2, 4, 8)
    ),
    *(autopar.ShardParallel(num_microbatches=m) for m in (1, 2)),
]


@functools.cache
def planned(method, budget):
    method = type(method)(**{**vars(method), "memory_budget_bytes": budget, "offload": "never"})
    step = autopar.parallelize(train_step, cluster=QUICK, method=method)
    return step.plan(*arguments(BATCH, WIDTH, LAYERS))


@pytest.fixture(scope="module")
def roomy():
    """The plan without a limit."""
    return planned(autopar.Auto(), 10**9)


def test_not_where_memory_does_not_bind(roomy):
    assert roomy.num_microbatches == 1
    assert not any("microbatches" in what for what, _ in roomy.alternatives)


def test_no_method_is_better(roomy):
    budget = int(0.65 * roomy.cost.peak_bytes[0])
    plan = planned(autopar.Auto(), budget)
    assert plan.num_microbatches > 1 and max(plan.cost.peak_bytes) <= budget
    for method in HANDS:
        with contextlib.suppress(InfeasibleError):
            assert plan.cost.step_seconds <= planned(method, budget).cost.step_seconds * (1 + 1e-6), method


def test_more_memory_gives_no_slower_plan(roomy):
    """Of so little, one stage in more microbatches, or one that recomputes, though fewer need no less and fit no better."""
    budgets = [int(share * roomy.cost.peak_bytes[0]) for share in (0.6, 0.65)]
    less, more = (planned(autopar.Auto(), budget).cost.step_seconds for budget in budgets)
    assert more <= less * (1 + 1e-6)
    for budget, seconds, count in zip(budgets, (less, more), (16, 8), strict=True):
        by_hand = planned(autopar.PipelineParallel(num_stages=1, num_microbatches=count), budget)
        assert seconds <= by_hand.cost.step_seconds * (1 + 1e-6)


def test_runs_and_comes_back_from_a_file(roomy, tmp_path):
    budget = int(0.7 * roomy.cost.peak_bytes[0])
    local = autopar.Cluster.local(jax.devices()[:4], device=QUICK.device, intra=FAST)
    step = autopar.parallelize(
        train_step, cluster=local, method=autopar.Auto(memory_budget_bytes=budget), donate_argnums=()
    )
    rng = np.random.default_rng(0)
    args = jax.tree.map(
        lambda a: jnp.asarray(rng.normal(size=a.shape, scale=0.1), a.dtype), arguments(BATCH, WIDTH, LAYERS)
    )
    plan = step.plan(*args)
    plan.save(tmp_path / "plan.json")
    again = autopar.Plan.load(tmp_path / "plan.json")
    assert again.num_microbatches == plan.num_microbatches > 1
    wanted = jax.jit(train_step)(*args)
    got = step.compile(*args, plan=again)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6), got, wanted)


def test_another_number_has_to_beat_what_is_priced_alike(roomy):
    """Not what the best program alone shows: the other is priced by what all programs had shown before."""
    sharded = roomy.origin.pipeline.stages[0].sharded
    faster, in_full = dataclasses.replace(sharded, compute_seconds=0.9 * sharded.compute_seconds), Exposure(1.0)
    shown = show(faster.graph, faster.body, faster.exposed_seconds)
    alone = dataclasses.replace(faster, exposure=in_full.as_in(shown, in_full))
    request = Request(None, None, QUICK, autopar.Auto())
    beat, exposure = _to_beat(Searched([alone], []), 4, request)
    priced = alone.as_compared(QUICK.device).solution.objective
    assert beat >= priced > (1 + TUNING.exposure_guessed) * alone.step_seconds, "on the clock it is faster"
    assert exposure == in_full.in_microbatches(1, 4)
    beaten = dataclasses.replace(request, beat=0.5 * priced)
    for searched in (Searched([alone], []), Searched([], [])):
        assert _to_beat(searched, 4, beaten)[0] == (1 + TUNING.exposure_guessed) * beaten.beat, "a step known elsewhere"
