"""The optimizer's state waits in the memory of the hosts where a step does not fit without: planned, run, told of."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar import Auto, Cluster, DataParallel, Link, PipelineParallel, Plan
from autopar.errors import AutoparError, InfeasibleError
from autopar.ir.trace.state import find_roles
from autopar.ir.trace.trace import trace_step
from autopar.mesh.catalog import MODELS
from autopar.search.offload import offloadable_state
from tests.sweep import check_faithful

WIDTH, BATCH, LAYERS = 16, 16, 2
DEVICE = autopar.Device("slow", 1e8, 1e9, 1e9, host_bytes_per_second=1e7)


def loss_of(params, batch):
    for name in sorted(params):
        batch = jnp.tanh(batch @ params[name])
    return jnp.mean(batch**2)


def scanned(params, batch):
    return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params["layers"])[0] ** 2)


def train(loss):
    def train_step(state, batch):
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
        return (jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments), value

    return train_step


def arguments(loss=loss_of):
    rng = np.random.default_rng(0)
    ws = jnp.asarray(rng.normal(size=(LAYERS, WIDTH, WIDTH)) / 4, jnp.float32)
    params = {"layers": ws} if loss is scanned else {f"layer{k}": ws[k] for k in range(LAYERS)}
    return (params, jax.tree.map(jnp.zeros_like, params)), jnp.asarray(rng.normal(size=(BATCH, WIDTH)), jnp.float32)


def parallel(method, loss=loss_of, device=DEVICE, **how):
    cluster = Cluster.local(jax.devices()[:4], device=device, intra=Link(1e-7, 1e9))
    return autopar.parallelize(train(loss), cluster=cluster, method=method, **how)


def check_equal(got, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), got, expected)


def tight(method, loss=loss_of):
    """The step in less memory than it needs with its moments on the devices."""
    budget, refused = 2**20, None
    while refused is None:
        try:
            plan = parallel(method(memory_budget_bytes=budget, offload="never"), loss).plan(*arguments(loss))
            assert not plan.offloaded and not plan.cost.host_bytes
            budget = max(plan.cost.peak_bytes) - 500  # half a moment on one device, but for the loss
        except InfeasibleError as error:
            refused = error
    assert 'Or offload="auto"' in str(refused)
    return parallel(method(memory_budget_bytes=budget), loss), budget


def data_parallel(**how):
    return DataParallel(**how)


def in_stages(**how):
    return PipelineParallel(num_stages=2, num_microbatches=2, recompute="cheap", **how)


@pytest.mark.parametrize("method, loss", [(data_parallel, scanned), (in_stages, loss_of)])
def test_where_nothing_else_fits(method, loss):
    step, budget = tight(method, loss)
    args = arguments(loss)
    compiled = step.compile(*args)
    check_faithful(compiled)
    plan = compiled.plan
    moments = [path for path in plan.offloaded if path.startswith("state/1/")]
    # What loops read as rows is least where the parameters are on the hosts, too.
    assert moments and (loss is scanned or len(moments) == len(plan.offloaded))
    assert max(plan.cost.peak_bytes) <= budget and plan.cost.host_bytes > 0
    assert "on the host" in str(plan) and "host memory" in str(plan)
    expected = jax.jit(train(loss))
    got, want = args, args
    for _ in range(3):
        state, value = compiled(*got)
        old, value_there = expected(*want)
        check_equal(value, value_there)
        got, want = (state, args[1]), (old, args[1])
    check_equal(jax.tree.map(np.asarray, state), old)


@pytest.fixture(scope="module")
def offloaded():
    """A step whose moments lie on the hosts, its arguments, and what it makes of them."""
    step, _ = tight(data_parallel)
    args = jax.tree.map(np.array, arguments())  # arrays that donating does not delete
    return step, args, step(*args)


def test_activations_too_where_neither_is_enough():
    (state, _), budget, plan = arguments(scanned), math.inf, None
    batch = jnp.asarray(np.random.default_rng(1).normal(size=(4 * BATCH, WIDTH)), jnp.float32)
    while True:
        step = parallel(DataParallel(zero=0, memory_budget_bytes=min(budget, 2**22)), scanned, donate_argnums=())
        try:
            plan = step.plan(state, batch)
        except InfeasibleError:
            break
        budget, last = max(plan.cost.peak_bytes) - 64, step
    assert plan.offloaded and plan.offloaded_activations
    check_equal(last(state, batch), jax.jit(train(scanned))(state, batch))


def moments_of(state):
    return jax.tree.leaves(state[1])


def lie_on_host(arrays):
    return {x.sharding.memory_kind for x in arrays} == {"pinned_host"}


def test_state_lies_there_between_steps(offloaded):
    step, args, (state, _) = offloaded
    assert lie_on_host(moments_of(state)) and not lie_on_host(jax.tree.leaves(state[0]))
    born = step.create_state(lambda: jax.tree.map(lambda x: x * 1.0, args[0]), example=args[1:])
    assert lie_on_host(moments_of(born))
    check_equal(jax.tree.map(np.asarray, step(born, args[1])), jax.tree.map(np.asarray, step(*args)))


def test_a_saved_plan_puts_it_there_too(offloaded, tmp_path):
    step, args, (state, _) = offloaded
    plan = step.plan(*args)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert str(loaded) == str(plan) and loaded.offloaded == plan.offloaded
    again, _ = step.compile(*args, plan=loaded)(*args)
    assert lie_on_host(moments_of(again))
    check_equal(jax.tree.map(np.asarray, again), jax.tree.map(np.asarray, state))


def test_it_goes_into_checkpoints_and_back(offloaded, tmp_path):
    checkpoint = pytest.importorskip("autopar.checkpoint")
    step, _, (state, _) = offloaded
    checkpoint.save(tmp_path, state, 1).wait()
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    restored = checkpoint.restore(tmp_path, like, compiled=step)
    assert lie_on_host(moments_of(restored))
    check_equal(jax.tree.map(np.asarray, restored), jax.tree.map(np.asarray, state))


def test_a_step_that_follows_leaves_it_there(offloaded):
    step, args, (state, _) = offloaded
    evaluate = autopar.follow(lambda state, batch: loss_of(state[0], batch) + 0 * state[1]["layer0"].sum(), step)
    check_equal(evaluate(state, args[1]), loss_of(jax.tree.map(np.asarray, state[0]), args[1]))
    there = evaluate.compiled(state, args[1]).in_shardings[0][0][1]
    assert {s.memory_kind for s in jax.tree.leaves(there)} >= {"pinned_host"}


def test_copies_have_their_price(offloaded):
    step, args, _ = offloaded
    dear = parallel(step.method, device=dataclasses.replace(DEVICE, host_bytes_per_second=1e5)).plan(*args)
    cheap = step.plan(*args).cost
    assert dear.cost.step_seconds > 2 * dear.cost.host_bytes / 1e5 > 10 * cheap.step_seconds  # there and back
    assert dear.cost.host_bytes == sum(x.nbytes for x in moments_of(args[0]))


def test_the_memory_of_hosts_has_an_end(offloaded):
    step, args, _ = offloaded

    def planned(size):
        return parallel(step.method, device=dataclasses.replace(DEVICE, host_memory_bytes=size)).plan(*args)

    needed = planned(np.inf).cost.host_bytes
    assert planned(needed).cost.host_bytes == needed
    with pytest.raises(InfeasibleError, match="(?s)hosts' memory is too small.*state is more") as caught:
        planned(needed - 1)
    assert (caught.value.needed_bytes, caught.value.budget_bytes) == (needed, needed - 1)


def test_hosts_of_the_catalog():
    for model in MODELS.values():
        assert 10e9 < model.device.host_memory_bytes < 1e12, model.device.name


def test_nothing_else_is_moved():
    """Parameters are read by the forward pass; a step without gradients has no optimizer."""
    program = trace_step(train(loss_of), arguments())
    assert offloadable_state(program, find_roles(program), parameters=False) == ("state/1/layer0", "state/1/layer1")
    program = trace_step(lambda cache, x: (cache + x.sum(), x @ cache), (jnp.eye(8), jnp.ones((4, 8))))
    assert offloadable_state(program, find_roles(program), parameters=False) == ()


def test_what_is_no_way_to_offload():
    with pytest.raises(AutoparError, match="(?s)offload='always'.*'auto', 'never'"):
        Auto(offload="always")
