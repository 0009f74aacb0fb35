"""Layers whose number the stages do not divide: parts of nearly equal lengths, and the numbers of plain jit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import checkpoint
from autopar.ir.split.placement import units_of_shard
from autopar.runtime.stacks import StackedArray

LAYERS, WIDTH, BATCH = 7, 8, 8
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def step(state, batch):
    """A training step of a scan over seven layers."""

    def loss_fn(params):
        def layer(x, w):
            return jnp.tanh(x @ w["kernel"] + w["bias"]), None

        x, _ = jax.lax.scan(jax.checkpoint(layer), batch["x"] @ params["first"], params["layers"])
        return jnp.mean((x @ params["head"] - batch["y"]) ** 2) + 1e-3 * jnp.sum(params["layers"]["kernel"][6] ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, optimizer = OPTIMIZER.update(grads, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, loss


def make_params():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape) * 0.3, jnp.float32)

    stacked = {"kernel": draw(LAYERS, WIDTH, WIDTH), "bias": draw(LAYERS, WIDTH)}
    return {"first": draw(2, WIDTH), "layers": stacked, "head": draw(WIDTH, 2)}


def make_arguments():
    rng = np.random.default_rng(1)
    params = make_params()
    batch = {name: jnp.asarray(rng.normal(size=(BATCH, 2)), jnp.float32) for name in "xy"}
    return {"params": params, "optimizer": OPTIMIZER.init(params)}, batch


def close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("count, length", [(16, 126), (3, 7), (5, 7), (4, 8)])
def test_shares_are_even_and_all_there_is(count, length):
    shares = [units_of_shard(k, count, length) for k in range(count)]
    sizes = [share.size for share in shares]
    assert sum(sizes) == length and 0 < min(sizes) == sizes[-1] and max(sizes) - min(sizes) <= 1
    assert [share.first for share in shares] == [sum(sizes[:k]) for k in range(count)]


@pytest.mark.parametrize("meshes, chunks, length", [(14, 2, 126), (4, 4, 61), (3, 2, 7)])
def test_chunks_of_a_mesh_are_even_together(meshes, chunks, length):
    """Of 126 layers in 28 parts for 14 meshes each has nine, and not ten or eight in turn."""
    sizes = [units_of_shard(k, meshes * chunks, length).size for k in range(meshes * chunks)]
    assert {sum(sizes[mesh::meshes]) for mesh in range(meshes)} <= {length // meshes, -(-length // meshes)}


@pytest.mark.parametrize("num_stages, schedule", [(2, "1f1b"), (3, "zb-h1")])
def test_same_numbers_and_plans_and_checkpoints(num_stages, schedule, tmp_path):
    """Also when the plan comes from a file, and when a state was saved by one pipeline and is read by the other."""
    state, batch = make_arguments()

    def pipeline(num_stages, schedule):
        method = autopar.PipelineParallel(num_stages=num_stages, num_microbatches=4, schedule=schedule)
        cluster = autopar.Cluster.local(jax.devices()[:num_stages])
        return autopar.parallelize(step, method=method, cluster=cluster, batch_argnums=(1,), donate_argnums=())

    parallel = pipeline(num_stages, schedule)
    parallel.plan(state, batch).save(tmp_path / "plan.json")
    compiled = parallel.compile(state, batch, plan=autopar.Plan.load(tmp_path / "plan.json"))
    stacks = compiled.plan.origin.pipeline.cut.stacks
    assert LAYERS % compiled.plan.parts and stacks.length == LAYERS, "parts that are not equal"
    assert sum(len(parts) == compiled.plan.parts for parts in stacks.inputs) == 6, "kernel, bias, their moments"
    want, got = state, state
    for _ in range(3):
        want, loss = jax.jit(step)(want, batch)
        got, found = compiled(got, batch)
        close((got, found), (want, loss))
    assert isinstance(got["params"]["layers"]["kernel"], StackedArray)
    checkpoint.save(tmp_path / "saved", got, 3).wait()
    restored = checkpoint.restore(tmp_path / "saved", got)
    kernel = restored["params"]["layers"]["kernel"]
    assert [part.shape for part in kernel.parts] == [part.shape for part in got["params"]["layers"]["kernel"].parts]
    close(restored, want)
    other = pipeline(5 - num_stages, "gpipe")
    close(checkpoint.restore(tmp_path / "saved", state, compiled=other.compile(state, batch)), want)
    close(other(got, batch), jax.jit(step)(want, batch))


def test_stages_of_many_layers_are_even_and_wait_little():
    """126 layers on 16 stages: none is empty, and under ZB-H1 all of them compute nine tenths of the time."""
    layers, width, rows = 126, 4096, 65536

    def train(params, batch):
        def loss_fn(params):
            x, _ = jax.lax.scan(
                lambda x, w: (jnp.tanh(x @ w["kernel"] + w["bias"]), None),
                batch["x"] @ params["first"],
                params["layers"],
            )
            return jnp.mean((x @ params["head"] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    shapes = {"first": (2, width), "kernel": (layers, width, width), "bias": (layers, width), "head": (width, 2)}
    types = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    params = {"first": types["first"], "layers": {k: types[k] for k in ("kernel", "bias")}, "head": types["head"]}
    batch = {name: jax.ShapeDtypeStruct((rows, 2), jnp.float32) for name in "xy"}
    method = autopar.ThreeD(data=2, pipeline=16, num_microbatches=64, schedule="zb-h1")
    parallel = autopar.parallelize(train, method=method, cluster=autopar.Cluster.of("4x8 h100"), batch_argnums=(1,))
    plan = parallel.plan(params, batch)
    cut = plan.origin.pipeline.cut
    of_stage = [0] * 16
    for at in cut.stacks.inputs[cut.paths.index("params/layers/kernel")]:
        of_stage[plan.values[at].stage] += cut.program.in_avals[at].shape[0]
    assert plan.parts == 16 and sum(of_stage) == layers
    assert 7 <= min(of_stage) and max(of_stage) <= 9, of_stage
    assert plan.origin.pipeline.waiting_share < 0.1
