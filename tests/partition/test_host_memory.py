"""What a step copies to the host's memory lies there: in the program, in the plan's bytes, on the clock."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import autopar
from autopar._jax import all_equations, on_host
from autopar.partition.order import after_in_buffer, end_of, host_buffer
from autopar.partition.program import run_body
from tests.sweep import check_faithful

LAYERS, WIDTH, BATCH = 3, 8, 64
SLOW = autopar.Device("slow", 1e8, 1e9, 1e9, host_bytes_per_second=1e7)
POLICY = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=["h"], offload_src="device", offload_dst="pinned_host"
)
DOTS = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")


def layer(x, w):
    return jnp.cos(checkpoint_name(jnp.sin(x @ w), "h")) + x


def in_a_scan(policy):
    def loss(ws, x):
        block = jax.checkpoint(layer, policy=policy)
        return jnp.mean(jax.lax.scan(lambda x, w: (block(x, w), None), x, ws)[0] ** 2)

    return loss


def unrolled(policy):
    def loss(ws, x):
        for k in range(LAYERS):
            x = jax.checkpoint(layer, policy=policy)(x, ws[k])
        return jnp.mean(x**2)

    return loss


def train(loss):
    def train_step(ws, batch):
        value, grads = jax.value_and_grad(loss)(ws, batch["x"])
        return ws - 0.1 * grads, value

    return train_step


def arguments():
    rng = np.random.default_rng(0)
    ws, x = rng.normal(size=(LAYERS, WIDTH, WIDTH)), rng.normal(size=(BATCH, WIDTH))
    return jnp.asarray(ws, jnp.float32), {"x": jnp.asarray(x, jnp.float32)}


def parallel(fn, method, device=SLOW):
    cluster = autopar.Cluster.local(jax.devices()[:4], device=device, intra=autopar.Link(1e-7, 1e9))
    return autopar.parallelize(fn, cluster=cluster, method=method, donate_argnums=())


def check_equal(got, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)


def kept_on_host(compiled):
    """Shapes of what the programs that run copy to the host."""
    for function in compiled.functions.values():
        structs = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in function.inputs]
        for eqn in all_equations(jax.make_jaxpr(function.code)(*structs).jaxpr):
            if eqn.primitive.name == "device_put" and on_host(eqn.outvars[0].aval):
                yield eqn.outvars[0].aval.shape


@pytest.mark.parametrize("loss, policy, copies", [(in_a_scan, POLICY, 1), (unrolled, DOTS, LAYERS)])
@pytest.mark.parametrize("method", [autopar.DataParallel(zero=3), autopar.DataParallel()], ids=str)
def test_lies_on_the_host(loss, policy, copies, method, recwarn):
    args, fn = arguments(), train(loss(policy))
    compiled = parallel(fn, method).compile(*args)
    check_faithful(compiled)
    rows = BATCH // 4 // compiled.plan.num_microbatches
    assert list(kept_on_host(compiled)) == [(rows, WIDTH)] * copies
    assert compiled.plan.cost.host_bytes == LAYERS * rows * WIDTH * 4
    assert "host memory" in str(compiled.plan)
    check_equal(compiled(*args), jax.jit(fn)(*args))
    assert not [w for w in recwarn if "host" in str(w.message)]


def test_not_in_the_memory_of_devices_and_at_a_price():
    def planned(policy, device=SLOW):
        return parallel(train(in_a_scan(policy)), autopar.DataParallel(), device).plan(*arguments())

    saved = planned(jax.checkpoint_policies.save_only_these_names("h"))
    offloaded, dear = planned(POLICY), planned(POLICY, dataclasses.replace(SLOW, host_bytes_per_second=1e5))
    rows = LAYERS * BATCH // 4 * WIDTH * 4
    assert saved.cost.host_bytes == 0 and offloaded.cost.host_bytes == rows
    assert max(offloaded.cost.peak_bytes) < max(saved.cost.peak_bytes)
    assert dear.cost.step_seconds > offloaded.cost.step_seconds + rows / 1e5


@pytest.mark.parametrize("loss, policy", [(in_a_scan, POLICY), (unrolled, DOTS)])
def test_in_microbatches(loss, policy, recwarn):
    args, fn = arguments(), train(loss(policy))
    compiled = parallel(fn, autopar.DataParallel(num_microbatches=2)).compile(*args)
    check_faithful(compiled)
    assert compiled.plan.cost.host_bytes == LAYERS * BATCH // 4 // 2 * WIDTH * 4
    assert set(kept_on_host(compiled)) == {(BATCH // 4 // 2, WIDTH)}
    check_equal(compiled(*args), jax.jit(fn)(*args))
    assert not [w for w in recwarn if "host" in str(w.message)]


@pytest.mark.parametrize("loss, policy", [(in_a_scan, POLICY), (unrolled, DOTS)])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_in_stages(loss, policy, schedule, recwarn):
    """A forward pass leaves on the host what its backward pass reads there."""
    args, fn = arguments(), train(loss(policy))
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=2, schedule=schedule)
    compiled = parallel(fn, method).compile(*args)
    check_faithful(compiled)
    there = [t for f in compiled.functions.values() if f.name.endswith("/F") for t in f.outputs if t.on_host]
    assert sum(t.num_bytes for t in there) == LAYERS * BATCH // 2 * WIDTH * 4
    assert compiled.plan.cost.host_bytes == max(
        in_flight * sum(t.local_bytes for t in compiled.functions[f"stage{k}/F"].outputs if t.on_host)
        for k, in_flight in ((0, 2), (1, 1))
    )
    check_equal(compiled(*args), jax.jit(fn)(*args))
    assert not [w for w in recwarn if "host" in str(w.message)]


@pytest.mark.parametrize(
    "method",
    [
        autopar.ShardParallel((2, 2)),
        autopar.DataParallel(zero=3),
        autopar.DataParallel(num_microbatches=2),
        autopar.PipelineParallel(num_stages=2, num_microbatches=2),
    ],
    ids=str,
)
def test_results_put_on_the_host_lie_there(method, recwarn):
    """The optimizer's state too, from the first call on: its old values lie where the step puts the new ones."""

    def fn(state, batch):
        ws, trace = jax.device_put(state, jax.memory.Space.Device)

        def loss(ws):
            first = layer(batch["x"], ws[0])
            return jnp.mean(layer(first, ws[1]) ** 2), first

        (value, first), grads = jax.value_and_grad(loss, has_aux=True)(ws)
        trace = jax.tree.map(lambda t, g: 0.9 * t + g, trace, grads)
        ws = jax.tree.map(lambda w, t: w - 0.1 * t, ws, trace)
        trace, first = jax.device_put((trace, first), jax.memory.Space.Host)
        return (ws, trace), value, first

    ws, batch = arguments()
    state = [ws[0], ws[1]], [jnp.zeros_like(ws[0]), jnp.zeros_like(ws[1])]
    step = parallel(fn, method)
    got, expected = step(state, batch), jax.jit(fn)(state, batch)
    got, expected = step(got[0], batch), jax.jit(fn)(expected[0], batch)
    check_equal(got, expected)
    kinds = jax.tree.map(lambda x: x.sharding.memory_kind, got)
    assert kinds == jax.tree.map(lambda x: x.sharding.memory_kind, expected)
    compiled = step.latest()
    check_faithful(compiled)
    assert {v.name for v in compiled.plan.values if v.on_host} == {"state/1/0", "state/1/1", "result/2"}
    assert not [w for w in recwarn if "host" in str(w.message)]


def test_what_lies_on_the_host_is_not_made_again(recwarn):
    """Even where that would be cheap: it was to be read from there."""

    def loss(ws, x):
        block = jax.checkpoint(lambda x, w: x + jnp.cos(checkpoint_name(jnp.sin(x), "h")) @ w, policy=POLICY)
        return jnp.mean(jax.lax.scan(lambda x, w: (block(x, w), None), x, ws)[0] ** 2)

    compiled = parallel(train(loss), autopar.DataParallel()).compile(*arguments())
    assert list(kept_on_host(compiled)) == [(BATCH // 4, WIDTH)]
    assert compiled.plan.cost.host_bytes == LAYERS * BATCH // 4 * WIDTH * 4


def test_there_and_back_by_hand():
    def fn(x, w):
        kept = jax.device_put(jnp.tanh(x @ w), jax.memory.Space.Host)
        return jax.device_put(kept, jax.memory.Space.Device) @ w

    ws, batch = arguments()
    compiled = parallel(fn, autopar.ShardParallel()).compile(batch["x"], ws[0])
    assert len(list(kept_on_host(compiled))) == 1
    np.testing.assert_allclose(compiled(batch["x"], ws[0]), jax.jit(fn)(batch["x"], ws[0]), rtol=1e-5, atol=1e-6)


def test_fetched_from_a_buffer():
    """What the program put there is fetched behind another value, and is what it was; no copy on the host is written."""

    @jax.jit
    def late(x, w):
        buffer = host_buffer(jax.device_put(x, jax.memory.Space.Host))
        there = after_in_buffer(buffer, x.shape, jnp.tanh(x @ w))
        return jax.device_put(there, jax.memory.Space.Device), end_of(buffer)

    x, w = (np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32) for _ in range(2))
    found, end = late(x, w)
    np.testing.assert_array_equal(found, x)
    assert end[0] == x[-1, -1]
    text = late.lower(x, w).compile().as_text()
    assert " dynamic-slice(" in text, "XLA cannot know where it begins"


def test_a_program_for_gpus_writes_nothing_on_the_host():
    """What it offloads outside of loops lies in a buffer with one element more."""
    plan = parallel(train(unrolled(POLICY)), autopar.DataParallel()).plan(*arguments())
    (task,) = plan.attached.pipeline.stages[0].tasks
    sizes = dict(plan.mesh.axis_sizes)
    local = [jax.ShapeDtypeStruct(s.local_shape(v.aval.shape, plan.mesh), v.aval.dtype) for v, s in task.body.inputs]
    emitted = jax.make_jaxpr(lambda *a: run_body(task.body, a, sizes, "cuda"), axis_env=list(sizes.items()))(*local)
    there = [eqn for eqn in emitted.eqns if any(on_host(v.aval) for v in eqn.outvars)]
    assert sum(eqn.primitive.name == "device_put" for eqn in there) == LAYERS
    assert not any(eqn.primitive.name == "optimization_barrier" for eqn in there)
    written = [eqn for eqn in there if eqn.primitive.name == "dynamic_update_slice"]
    assert len(written) == LAYERS
    for eqn in written:
        buffer, value = (v.aval for v in eqn.invars[:2])
        assert on_host(buffer) and buffer.shape == (value.size + 1,)
