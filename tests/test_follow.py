"""State made in its place, eval steps that follow it, measured timelines, and the search over pipelines."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import AutoparError, BatchError, PipelineError, StructureChangedError
from tests.live_bytes import most_live_bytes
from tests.sweep import QUICK, SLOW

LAYERS, WIDTH = 4, 32


def step(state, batch):
    def loss_fn(params):
        x, _ = jax.lax.scan(lambda x, k: (jnp.tanh(x @ k), None), batch["x"], params["layers"])
        return jnp.mean((x @ params["head"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, loss


def init():
    key = jax.random.key(0)
    return {
        "params": {
            "layers": jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5,
            "head": jax.random.normal(key, (WIDTH, 2)),
        }
    }


def evaluate(params, batch):
    x, _ = jax.lax.scan(lambda x, k: (jnp.tanh(x @ k), None), batch["x"], params["layers"])
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2)


BATCH = {
    "x": np.random.default_rng(0).normal(size=(8, WIDTH)).astype(np.float32),
    "y": np.zeros((8, 2), np.float32),
}


def parallel(method, devices=8):
    cluster = autopar.Cluster.local(jax.devices()[:devices], device=SLOW, intra=QUICK)
    return autopar.parallelize(step, cluster=cluster, method=method, batch_argnums=(1,))


@pytest.mark.parametrize(
    "method",
    [
        autopar.ShardParallel((2, 4)),
        autopar.PipelineParallel(num_stages=4, num_microbatches=2),
        autopar.PipelineParallel(submeshes=(1, 1, 2, 4), num_microbatches=2),
    ],
)
def test_state_is_born_in_its_place(method):
    train = parallel(method)
    state = train.create_state(init, example=(BATCH,))
    expected, loss = jax.jit(step)(init(), BATCH)
    got, got_loss = train(state, BATCH)
    np.testing.assert_allclose(got_loss, loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5, atol=1e-6)


def test_it_says_whom_it_follows():
    train = parallel(autopar.ShardParallel((2, 4)))
    assert repr(autopar.follow(step, train)) == "<parallel step step; follows step>"


def test_a_stack_on_equal_stages_is_one_array():
    train = parallel(autopar.PipelineParallel(num_stages=4, num_microbatches=2))
    state = train.create_state(init, example=(BATCH,))
    layers = state["params"]["layers"]
    assert isinstance(layers, jax.Array) and layers.sharding.spec[0] == "stage"
    assert len({shard.device for shard in layers.addressable_shards}) == 8
    with jax.sharding.set_mesh(layers.sharding.mesh) if hasattr(jax.sharding, "set_mesh") else jax.disable_jit(False):
        np.testing.assert_allclose(np.asarray(layers), init()["params"]["layers"], rtol=1e-6)


def keyed_step(state, batch):
    """Its state holds typed random keys, one and several."""
    key, own = jax.random.split(state["key"])
    noisy = {name: x + 0.01 * jax.random.normal(own, x.shape) for name, x in batch.items()}
    new, loss = step({"params": state["params"]}, noisy)
    return {**new, "key": key, "spare": state["spare"]}, loss


def keyed_init():
    return {**init(), "key": jax.random.key(1), "spare": jax.random.split(jax.random.key(2), 8)}


@pytest.mark.parametrize(
    "method", [autopar.ShardParallel((2, 4)), autopar.PipelineParallel(num_stages=4, num_microbatches=2)]
)
def test_random_keys_are_born_in_their_place(method):
    cluster = autopar.Cluster.local(device=SLOW, intra=QUICK)
    train = autopar.parallelize(keyed_step, cluster=cluster, method=method, batch_argnums=(1,))
    state = train.create_state(keyed_init, example=(BATCH,))
    compiled = train.latest()
    specs = compiled.plan.shardings[0][0]
    assert (len(specs["key"]), len(specs["spare"])) == (0, 1), "one entry per dim of the user's array"
    assert compiled.in_shardings[0][0]["spare"].spec == specs["spare"]
    assert jnp.issubdtype(state["key"].dtype, jax.dtypes.prng_key)
    placed = jax.device_put(keyed_init()["spare"], compiled.in_shardings[0][0]["spare"])
    expected = jax.jit(keyed_step)(keyed_init(), BATCH)
    got = train({**state, "spare": placed}, BATCH)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5, atol=1e-6)


def test_new_state_has_the_types_of_the_steps():
    train = parallel(autopar.ShardParallel((8,)))
    train(init(), BATCH)
    wrong = {"params": {**init()["params"], "layers": jnp.zeros((LAYERS, WIDTH, 2))}}
    with pytest.raises(StructureChangedError, match=r"state/params/layers is float32\[4,32,2\]; it was") as caught:
        train.create_state(lambda: wrong)
    assert caught.value.path == "state/params/layers"
    whole = jax.tree.map(lambda x: x.astype(jnp.bfloat16), init())
    with pytest.raises(StructureChangedError, match=r"(?s)head is bfloat16\[32,2\].*layers is bfloat16"):
        train.create_state(lambda: whole)


def test_state_that_is_passed_by_name():
    train = parallel(autopar.ShardParallel((8,)))
    train(state=init(), batch=BATCH)
    state = train.create_state(init)
    np.testing.assert_allclose(train(state=state, batch=BATCH)[1], jax.jit(step)(init(), BATCH)[1], rtol=1e-5)


SQUARE = {"first": np.eye(WIDTH, dtype=np.float32), "second": np.eye(WIDTH, dtype=np.float32)}


def square_loss(params, batch, scale=1.0, noise=None):
    noise = 0.0 if noise is None else jax.random.normal(jax.random.wrap_key_data(noise), batch["x"].shape)
    return scale * jnp.mean((jnp.tanh((batch["x"] + noise) @ params["first"]) @ params["second"]) ** 2)


def square_step(params, batch):
    loss, grads = jax.value_and_grad(square_loss)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


@pytest.mark.parametrize(
    "args, kwargs, options",
    [
        ((), {}, {}),
        ((), {"scale": 2.0}, {}),
        ((2.0, np.array([1, 2], np.uint32)), {}, {}),  # the raw key has a leading dim too
        ((2.0,), {"noise": np.array([1, 2], np.uint32)}, {"batch_argnums": 1}),
        ((2.0,), {}, {"static_argnums": 2}),
        ((), {"scale": 2.0}, {"static_argnames": "scale"}),
    ],
)
def test_parameters_of_one_leading_dim_are_no_batch(args, kwargs, options):
    train = autopar.parallelize(square_step, method=autopar.ShardParallel((8,)), batch_argnums=1)
    params, _ = train(SQUARE, {"x": BATCH["x"]})
    follower = autopar.follow(square_loss, train, **options)
    half = {"x": BATCH["x"][:4]}
    expected = square_loss(jax.tree.map(np.asarray, params), half, *args, **kwargs)
    np.testing.assert_allclose(follower(params, half, *args, **kwargs), expected, rtol=1e-5)
    roles = {v.name: v.role for v in follower.parallel().latest().plan.values}
    assert roles["batch/x"] == "batch" and [n for n, role in roles.items() if role == "batch"] == ["batch/x"]


def test_follow_takes_the_options_it_names():
    train = parallel(autopar.ShardParallel((8,)))
    with pytest.raises(TypeError, match="method"):
        autopar.follow(evaluate, train, method=autopar.DataParallel())
    with pytest.raises(BatchError, match="there is no argument 2"):
        autopar.follow(evaluate, train, batch_argnums=2)
    train = autopar.parallelize(square_step, method=autopar.ShardParallel((8,)), batch_argnums=1)
    params, _ = train(SQUARE, {"x": BATCH["x"]})
    two = autopar.follow(lambda params, a, b: jnp.mean(a @ b) + params["first"].sum(), train)
    with pytest.raises(BatchError, match=r"argument 1 \(a\): leading dim 64; argument 2 \(b\): leading dim 32"):
        two(params, np.ones((64, 32)), np.ones((32, 64)))


@pytest.mark.parametrize("method", [autopar.ShardParallel((2, 4)), autopar.DataParallel(zero=3)])
def test_follow(method):
    train = parallel(method)
    follower = autopar.follow(evaluate, train)
    with pytest.raises(StructureChangedError, match="no plan yet"):
        follower(init()["params"], BATCH)
    state, _ = train(init(), BATCH)
    loss = follower(state["params"], BATCH)
    np.testing.assert_allclose(loss, evaluate(jax.tree.map(np.asarray, state["params"]), BATCH), rtol=1e-5)
    trained = train.latest().plan.shardings[0][0]["params"]
    assert follower.plan(state["params"], BATCH).shardings[0][0] == trained


def test_follow_says_what_it_cannot():
    with pytest.raises(AutoparError, match="no step to follow"):
        autopar.follow(evaluate, evaluate)
    train = parallel(autopar.ShardParallel((8,)))
    train(init(), BATCH)
    with pytest.raises(StructureChangedError, match="no argument of the step is state of the one that it follows"):
        autopar.follow(lambda x: x, train)(jnp.ones(3))
    piped = parallel(autopar.PipelineParallel(num_stages=4, num_microbatches=2))
    state, _ = piped(init(), BATCH)
    with pytest.raises(PipelineError, match="cannot follow so many stages"):
        autopar.follow(lambda params, batch: jnp.sum(batch["x"]) * params["head"], piped)(state["params"], BATCH)


def predict(params, batch):
    """Per sample, a mean, and something of the parameters alone."""
    x, _ = jax.lax.scan(lambda x, k: (jnp.tanh(x @ k), None), batch["x"], params["layers"])
    out = x @ params["head"]
    return {"out": out, "loss": jnp.mean((out - batch["y"]) ** 2), "norm": jnp.sum(params["layers"] ** 2)}


def check_followed(train, follower, state, batch, fn=predict):
    host = jax.tree.map(np.asarray, state["params"])
    expected = jax.jit(fn)(host, batch)
    got = follower(state["params"], batch)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5, atol=1e-6)
    compiled = follower.parallel(state["params"], batch).latest()
    assert compiled.in_shardings[0][0] == train.latest().in_shardings[0][0]["params"], "nothing moves"
    assert {v.role for v in compiled.plan.values if v.name.startswith("b")} == {"batch"}
    return compiled.plan


@pytest.mark.parametrize(
    "method, schedule",
    [
        (autopar.PipelineParallel(num_stages=4, num_microbatches=2), "inference"),
        (autopar.PipelineParallel(num_stages=2, num_microbatches=4, schedule="zb-h1"), "inference"),
        (autopar.PipelineParallel(submeshes=(1, 1, 2, 4), num_microbatches=2), "inference"),
        (autopar.PipelineParallel(num_stages=2, num_microbatches=2, schedule="interleaved"), "interleaved"),
        (autopar.ThreeD(data=2, tensor=2, pipeline=2, num_microbatches=2), "inference"),
    ],
)
def test_follow_a_pipeline(method, schedule):
    train = parallel(method)
    state = train.create_state(init, example=(BATCH,))
    follower = autopar.follow(predict, train)
    for _ in range(2):
        state, _ = train(state, BATCH)
        plan = check_followed(train, follower, state, BATCH)
    assert plan.schedule == schedule and len(plan.stages) == len(train.latest().plan.stages)
    assert plan.num_microbatches == train.latest().plan.num_microbatches
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array))
    odd = {name: array[:3] for name, array in BATCH.items()}
    check_followed(train, follower, state, odd)


def unrolled(params, batch):
    """Tied: the first stage's embedding is also what the last one ends with."""
    x = batch["x"] @ params["embed"]
    for kernel in params["kernels"]:
        x = jnp.tanh(x @ kernel)
    return x @ params["embed"].T


def train_unrolled(state, batch):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((unrolled(p, batch) - batch["x"]) ** 2))(state["params"])
    return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, loss


@pytest.mark.parametrize(
    "fn", [unrolled, lambda p, b: jnp.argmax(unrolled(p, b).sum(0)), jax.grad(lambda p, b: jnp.sum(unrolled(p, b)))]
)
def test_follow_tied_weights_unrolled(fn):
    """A step with a backward pass too, and one that cannot be worked through in microbatches."""
    random = np.random.default_rng(1)
    params = {
        "embed": random.normal(size=(WIDTH, 16)).astype(np.float32) / 4,
        "kernels": [random.normal(size=(16, 16)).astype(np.float32) / 4 for _ in range(6)],
    }
    cluster = autopar.Cluster.local(jax.devices()[:4], device=SLOW, intra=QUICK)
    method = autopar.PipelineParallel(submeshes=(1, 1, 2), num_microbatches=4)
    train = autopar.parallelize(train_unrolled, cluster=cluster, method=method, batch_argnums=(1,))
    state, _ = train({"params": params}, {"x": BATCH["x"]})
    check_followed(train, autopar.follow(fn, train), state, {"x": BATCH["x"]}, fn)


def test_measured_timeline():
    compiled = parallel(autopar.PipelineParallel(num_stages=2, num_microbatches=4)).compile(init(), BATCH)
    (state, loss), timeline = compiled.measure(init(), BATCH)
    np.testing.assert_allclose(loss, jax.jit(step)(init(), BATCH)[1], rtol=1e-5)
    planned = compiled.plan.timeline()
    assert isinstance(timeline, type(planned)) and len(timeline.events) == len(planned.events)
    assert {e.name for e in timeline.events} == {e.name for e in planned.events}
    assert all(e.end >= e.start >= 0 for e in timeline.events)
    events = [e for e in json.loads(timeline.json())["traceEvents"] if e["ph"] == "X"]
    assert events and all({"kind", "stage", "microbatch", "mesh"} == set(e["args"]) for e in events)
    whole = parallel(autopar.ShardParallel((8,))).compile(init(), BATCH)
    assert not whole.measure(init(), BATCH, steps=1)[1].events, "one program is no timeline"


def test_live_bytes_stay_below_the_predicted_peak():
    """Bytes of live arrays per device, looked at after every instruction."""
    compiled = parallel(autopar.PipelineParallel(num_stages=4, num_microbatches=8)).compile(init(), BATCH)
    most = most_live_bytes(compiled, jax.tree.leaves((init(), BATCH)))
    numbers = 8 * 4  # the numbers of the microbatches, which live on from step to step
    for mesh, peak in enumerate(compiled.plan.cost.peak_bytes):
        assert most[mesh] <= peak + numbers


def test_auto_on_several_hosts_is_no_worse_than_fixed_pipelines():
    cluster = autopar.Cluster(2, 2, SLOW, intra=QUICK, inter=autopar.Link(1e-5, 1e7))

    def seconds(method):
        planned = autopar.parallelize(step, cluster=cluster, method=method, batch_argnums=(1,))
        return planned.plan(init(), BATCH).cost.step_seconds

    best = seconds(autopar.Auto())
    for degrees in ((4, 1, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)):
        data, tensor, pipeline = degrees
        method = autopar.ThreeD(data=data, tensor=tensor, pipeline=pipeline, num_microbatches=8 // data)
        assert best <= seconds(method) * (1 + 1e-9), degrees
