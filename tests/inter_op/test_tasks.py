"""Backward scans in two: the same numbers, weights' products in the second, and few bytes between the two."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar._jax import eval_jaxpr, make_jaxpr
from autopar.inter_op.tasks import scan_halves
from autopar.ir.check import check_program
from autopar.ir.dataflow import inputs_of
from autopar.ir.gradient import is_backward
from autopar.ir.region import region_of
from autopar.ir.trace.trace import trace_step
from autopar.ir.work import num_bytes

LAYERS, WIDTH = 3, 8
RNG = np.random.default_rng(0)
KERNELS = (RNG.normal(size=(LAYERS, WIDTH, WIDTH)) / 3).astype(np.float32)
SHARED = (RNG.normal(size=(WIDTH, WIDTH)) / 3).astype(np.float32)
X = RNG.normal(size=(4, WIDTH)).astype(np.float32)


def in_halves(layer, reverse=False):
    """The backward scan of the gradients of `x` and the weights; both halves of it, of which the first makes that of `x`."""

    def loss_fn(x, kernels, shared):
        return jnp.sum(lax.scan(lambda x, k: (layer(x, k, shared), None), x, kernels, reverse=reverse)[0] ** 2)

    program = trace_step(jax.grad(loss_fn, argnums=(0, 1, 2)), (X, KERNELS, SHARED))
    (whole,) = [e for e in program.jaxpr.eqns if e.primitive.name == "scan" and is_backward(e)]
    halves = scan_halves(whole, {program.jaxpr.outvars[0]})
    if halves is not None:
        eqns = [half for e in program.jaxpr.eqns for half in (halves if e is whole else (e,))]
        apart = make_jaxpr(program.jaxpr.invars, program.jaxpr.outvars, eqns)
        check_program(apart)
        inputs = program.flatten_inputs([X, KERNELS, SHARED])
        want, got = (jax.jit(lambda *xs, j=j: eval_jaxpr(j, (), *xs))(*inputs) for j in (program.jaxpr, apart))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)
    return whole, halves


def num_products(eqn):
    return [e.primitive.name for e in region_of(eqn).bodies[0].eqns].count("dot_general")


def passed_bytes(first, second):
    return sum(num_bytes(v) for v in first.outvars if v in inputs_of(second))


@pytest.mark.parametrize("reverse", [False, True])
def test_products_of_weights_are_in_the_second(reverse):
    """Their sums over the trips, too; of the cotangents only one goes over, and what is cheap is made of it."""
    whole, halves = in_halves(lambda x, k, shared: jnp.tanh(jnp.sin(x @ k) * 2 + x @ shared), reverse)
    assert [num_products(e) for e in (whole, *halves)] == [4, 2, 2]
    first, second = map(region_of, halves)
    assert len(first.carries) == 1 and len(second.carries) == 1 and len(second.ys) == 1
    assert passed_bytes(*halves) == LAYERS * X.nbytes
    assert {v for e in halves for v in e.outvars} >= set(whole.outvars)


def test_what_was_run_again_is_not_run_a_third_time():
    layer = jax.checkpoint(lambda x, k, shared: jnp.tanh(jnp.tanh(x @ k) @ shared))
    whole, halves = in_halves(layer)
    assert sum(map(num_products, halves)) == num_products(whole)


def test_nothing_heavy_is_left_for_the_second():
    assert in_halves(lambda x, k, shared: jnp.tanh(x * k[0]) + shared[0])[1] is None


def test_weights_wait_in_a_pipeline_of_scanned_layers():
    """ZB-H1 waits about a third of what 1F1B does; it gained nothing while loops did both at once."""

    def train(params, batch):
        def loss_fn(params):
            x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params)
            return jnp.mean((x - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return params - 0.1 * grads, loss

    params = jax.ShapeDtypeStruct((8, 2048, 2048), np.float32)
    batch = {name: jax.ShapeDtypeStruct((8192, 2048), np.float32) for name in "xy"}
    cluster = autopar.Cluster(
        1, 4, autopar.Device("d", 1e13, 1e11, 1e12), autopar.Link(1e-7, 1e12), autopar.Link(1e-7, 1e12)
    )
    waiting = {}
    for schedule in ("1f1b", "zb-h1"):
        method = autopar.PipelineParallel(num_stages=4, num_microbatches=8, schedule=schedule)
        plan = autopar.parallelize(train, method=method, cluster=cluster, batch_argnums=(1,)).plan(params, batch)
        waiting[schedule] = plan.origin.pipeline.waiting_share
    assert waiting["zb-h1"] < 0.45 * waiting["1f1b"], waiting


def test_loops_stay_whole_where_halves_do_not_fit(tmp_path):
    """What was refused for memory is planned under the same schedule with whole loops, which says so, and runs."""

    def train(params, batch):
        def loss_fn(params):
            layer = jax.checkpoint(lambda x, w: (x + jnp.tanh(jnp.tanh(x @ w) @ w.T), None))
            return jnp.mean((lax.scan(layer, batch["x"], params)[0] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return params - 0.1 * grads, loss

    def planned(schedule, budget=None):
        method = autopar.PipelineParallel(
            num_stages=2, num_microbatches=4, schedule=schedule, memory_budget_bytes=budget
        )
        cluster = autopar.Cluster.local(jax.devices()[:2])
        parallel = autopar.parallelize(train, method=method, cluster=cluster, donate_argnums=())
        return parallel, parallel.plan(params, batch)

    params, batch = (
        0.3 * RNG.normal(size=(8, 16, 16)).astype(np.float32),
        dict.fromkeys("xy", RNG.normal(size=(256, 16))),
    )
    peaks = {name: max(planned(name)[1].cost.peak_bytes) for name in ("zb-h1", "zb-h1-whole")}
    assert peaks["zb-h1-whole"] < 0.8 * peaks["zb-h1"]
    assert planned("zb-h1", peaks["zb-h1"])[1].schedule == "zb-h1"
    with pytest.warns(match="do not fit the memory; 'zb-h1-whole', which keeps them whole, is used"):
        parallel, plan = planned("zb-h1", peaks["zb-h1-whole"])
    plan.save(tmp_path / "plan.json")
    step = parallel.compile(params, batch, plan=autopar.Plan.load(tmp_path / "plan.json"))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), step(params, batch), train(params, batch)
    )
