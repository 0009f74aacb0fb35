"""An array that is passed to a step twice, and may be overwritten once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.sweep import QUICK, SLOW

BATCH = {"x": np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)}
METHODS = {
    1: autopar.ShardParallel((1,)),
    4: autopar.ShardParallel((4,)),
    2: autopar.PipelineParallel(num_stages=2, num_microbatches=2),
}


def predict(params, batch):
    return jnp.tanh(batch["x"] @ params["up"]) @ params["down"]


def towards(params, target, batch):
    """A step of `params` towards what `target` predicts."""

    def loss_fn(params):
        return jnp.mean((predict(params, batch) - predict(target, batch) - 1) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def with_target(state, batch):
    params, loss = towards(state["params"], state["target"], batch)
    target = jax.tree.map(lambda t, p: 0.9 * t + 0.1 * p, state["target"], params)
    return {"params": params, "target": target}, loss


def params():
    return {name: jnp.eye(8) * size for name, size in (("up", 0.5), ("down", 0.3))}


def parallel(fn, num_devices, batch):
    cluster = autopar.Cluster.local(jax.devices()[:num_devices], device=SLOW, intra=QUICK)
    return autopar.parallelize(fn, cluster=cluster, method=METHODS[num_devices], batch_argnums=batch)


def same(array):
    return array


def another_over_the_same_memory(array):
    parts = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def check(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize("num_devices", METHODS)
@pytest.mark.parametrize("again", [same, another_over_the_same_memory])
def test_donated_twice(num_devices, again):
    """A target network is set to the parameters."""
    step = parallel(with_target, num_devices, 1)
    state, _ = step({"params": params(), "target": params()}, BATCH)
    for _ in range(2):
        host = jax.tree.map(np.asarray, state["params"])
        state, loss = step({"params": state["params"], "target": jax.tree.map(again, state["params"])}, BATCH)
        check((state, loss), with_target({"params": host, "target": host}, BATCH))


@pytest.mark.parametrize("num_devices", METHODS)
@pytest.mark.parametrize("again", [same, another_over_the_same_memory])
def test_donated_and_kept(num_devices, again):
    """What is only read is there afterwards too."""
    step = parallel(towards, num_devices, 2)
    state, _ = step(params(), params(), BATCH)
    for _ in range(2):
        host, reference = jax.tree.map(np.asarray, state), jax.tree.map(again, state)
        state, loss = step(state, reference, BATCH)
        check((state, loss), towards(host, host, BATCH))
        check(reference, host)


@pytest.mark.parametrize("num_devices", METHODS)
def test_donated_and_captured(num_devices):
    first, _ = parallel(towards, num_devices, 2)(params(), params(), BATCH)
    host = jax.tree.map(np.asarray, first)
    step = parallel(lambda params, batch: towards(params, first, batch), num_devices, 1)
    expected = towards(host, host, BATCH)
    state, loss = step(first, BATCH)
    check((state, loss), expected)
    check(step(state, BATCH), towards(expected[0], host, BATCH))


def test_nothing_is_copied_where_nothing_is_shared():
    step = parallel(towards, 4, 2)
    reference = jax.device_put(params(), step.compile(params(), params(), BATCH).in_shardings[0][1])
    state, _ = step(params(), reference, BATCH)
    before = jax.tree.leaves(state)
    step(state, reference, BATCH)
    assert all(array.is_deleted() for array in before)
