"""Five steps on Ray equal five steps of the local runtime, bit for bit: the same programs in the same order."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest

import autopar
from tests.models.registry import CASES
from tests.partition import test_host_memory as in_steps
from tests.search import test_offload as of_state
from tests.search import test_padding as longer
from tests.sweep import QUICK, SLOW, _host
from tests.test_pipeline import balanced_experts

pytestmark = pytest.mark.ray

MODELS = {
    "gpt_scan": 2,
    "gpt_unrolled": 2,
    "moe_top2_capacity": 2,
    "wide_resnet_plain": 1,
    "t5_relative_adafactor": 2,
}
"""Models, and in how many microbatches: batch statistics want one."""
LAYOUTS = {
    "2 stages x 1 process x 2 devices": ((1, 4), {"num_stages": 2}),
    "2 stages x 2 processes x 2 devices": ((4, 2), {"num_stages": 2}),
    "4 stages on 1+1+2+4 devices": ((1, 8), {"submeshes": (1, 1, 2, 4)}),
}
"""Hosts and devices per host, and how they are divided into stages."""
QUICK_CELLS = {
    "gpt_scan": list(LAYOUTS)[:1],
    "gpt_unrolled": [],
    "moe_top2_capacity": list(LAYOUTS)[1:2],
    "wide_resnet_plain": list(LAYOUTS)[2:],
    "t5_relative_adafactor": [],
}
"""What `make test` runs of them, each layout once; `pytest -m slow` runs all."""
CELLS = [
    pytest.param(name, layout, marks=() if layout in QUICK_CELLS[name] else pytest.mark.slow)
    for name in MODELS
    for layout in LAYOUTS
]
ACROSS_HOSTS = 1e-5
"""Sums over several processes are Gloo's, which adds in another order than one process does."""
STEPS = 5


def five_steps(case, step):
    state, found = case.state, []
    for number in range(STEPS):
        state, metrics = step(state, case.batches[number % len(case.batches)])
        found.append(jax.tree.map(_host, (state, metrics)))
    return found


def check_equal(got, want, tolerance=0.0):
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True):
            place = f"step {number}: {jax.tree_util.keystr(path)}"
            assert a.dtype == b.dtype and a.shape == b.shape, place
            if tolerance:
                np.testing.assert_allclose(
                    a, b, atol=tolerance * max(1.0, float(np.max(np.abs(b), initial=0))), err_msg=place
                )
            else:
                np.testing.assert_array_equal(a, b, err_msg=place)


def local(num_devices):
    return autopar.Cluster.local(jax.devices()[:num_devices], device=SLOW, intra=QUICK, inter=QUICK)


@pytest.mark.parametrize("name, layout", CELLS)
def test_pipeline(clusters, name, layout):
    case = CASES[name]()
    shape, stages = LAYOUTS[layout]
    method = autopar.PipelineParallel(num_microbatches=MODELS[name], schedule="1f1b", **stages)
    on_ray = autopar.parallelize(case.step, cluster=clusters[shape], method=method, batch_argnums=(1,))
    here = autopar.parallelize(case.step, cluster=local(shape[0] * shape[1]), method=method, batch_argnums=(1,))
    got, want = five_steps(case, on_ray), five_steps(case, here)
    check_equal(got, want, ACROSS_HOSTS if shape == (4, 2) else 0.0)


@pytest.mark.parametrize(
    "name, shape",
    [
        pytest.param("mlp_schedule_clip", (4, 2), id="MLP on 4 processes"),
        pytest.param("mlp_schedule_clip", (1, 4), id="MLP on 1 process"),
        pytest.param("gpt_tied_dropout", (1, 4), id="GPT on 1 process", marks=pytest.mark.slow),
        pytest.param("gpt_tied_dropout", (4, 2), id="GPT on 4 processes", marks=pytest.mark.slow),
    ],
)
def test_step_without_stages(clusters, name, shape):
    case = CASES[name]()
    method = autopar.ShardParallel()
    on_ray = autopar.parallelize(case.step, cluster=clusters[shape], method=method, batch_argnums=(1,))
    here = autopar.parallelize(case.step, cluster=local(shape[0] * shape[1]), method=method, batch_argnums=(1,))
    check_equal(five_steps(case, on_ray), five_steps(case, here), ACROSS_HOSTS if shape == (4, 2) else 0.0)


@pytest.mark.parametrize("name, schedule", [("gpt_tied_dropout", "interleaved"), ("mlp_schedule_clip", "zb-h1")])
def test_schedules(clusters, name, schedule):
    """Dropout's keys are state that stays in this process; interleaved, a worker has two stages."""
    case = CASES[name]()
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=4, schedule=schedule)
    on_ray = autopar.parallelize(case.step, cluster=clusters[1, 4], method=method, batch_argnums=(1,))
    here = autopar.parallelize(case.step, cluster=local(4), method=method, batch_argnums=(1,))
    check_equal(five_steps(case, on_ray), five_steps(case, here))


STAGES = autopar.PipelineParallel(num_stages=2, num_microbatches=2)


def compared(clusters, step, state, batch, method):
    """The same steps on Ray and here; what was compiled there."""
    case = SimpleNamespace(step=step, state=state, batches=[batch])
    there, here = (
        autopar.parallelize(case.step, cluster=cluster, method=method, batch_argnums=(1,))
        for cluster in (clusters[1, 4], local(4))
    )
    check_equal(five_steps(case, there), five_steps(case, here))
    return there.compile(state, batch)


@pytest.mark.parametrize("policy", [in_steps.POLICY, in_steps.DOTS])
def test_activations_on_the_host(clusters, policy, recwarn):
    loss = in_steps.in_a_scan if policy is in_steps.POLICY else in_steps.unrolled
    ws, batch = in_steps.arguments()
    compiled = compared(clusters, in_steps.train(loss(policy)), ws, batch, STAGES)
    left = [kind for program in compiled.functions.values() for kind in program.outputs if kind.on_host]
    assert left and compiled.plan.cost.host_bytes > 0
    assert not [w for w in recwarn if "host" in str(w.message)]


def test_sums_that_backward_passes_wait_for(clusters):
    case = balanced_experts()
    compiled = compared(clusters, case.step, case.state, case.batches[0], STAGES)
    assert "stage0/M" in compiled.functions


def test_optimizer_state_on_the_host(clusters):
    _, budget = of_state.tight(of_state.in_stages)
    state, batch = of_state.arguments()
    method = of_state.in_stages(memory_budget_bytes=budget)
    compiled = compared(clusters, of_state.train(of_state.loss_of), state, batch, method)
    assert compiled.plan.offloaded
    assert {s.memory_kind for s in jax.tree.leaves(compiled.in_shardings[0][0][1])} == {"pinned_host"}


def test_longer_dims(clusters, monkeypatch):
    longer.take_the_longer_step(monkeypatch)
    params, batch = longer.arguments(8, 1)
    compiled = compared(clusters, longer.train_step, params, batch, STAGES)
    assert compiled.plan.padded == ((longer.VOCABULARY, 64),)
    assert compiled(params, batch)[0]["table"].shape == (longer.VOCABULARY, longer.WIDTH)
