"""Stages are even in seconds: what moves bytes takes its time, and stages on more devices take more of the work."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import autopar
from autopar.inter_op.borders import balanced_borders
from autopar.inter_op.cut import cut_step
from autopar.inter_op.weigh import weigh_segments

WIDTH, ROWS = 64, 256
DEVICE = autopar.Device("slow memory", 2e10, memory_bytes_per_second=1e9)
LINK = autopar.Link(1e-7, 1e9)


def step(params, x):
    """Eight products, and then sixteen layers without any."""

    def loss_fn(params):
        y = x
        for kernel in params["products"]:
            y = jnp.tanh(y @ kernel)
        for scale in params["scales"]:
            y = y - jax.nn.softmax(y * scale)
        return jnp.mean(y**2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def planned(**settings):
    params = {
        "products": [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 8,
        "scales": [jax.ShapeDtypeStruct((WIDTH,), jnp.float32)] * 16,
    }
    method = autopar.PipelineParallel(num_microbatches=4, **settings)
    cluster = autopar.Cluster(1, 4, device=DEVICE, intra=LINK, inter=LINK)
    batch = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    return autopar.parallelize(step, cluster=cluster, method=method, batch_argnums=(1,)).plan(params, batch)


def seconds_of(plan):
    """Of each stage, those of one microbatch."""
    return [sum(t.seconds for t in stage.tasks if t.task.is_in_loop) for stage in plan.origin.pipeline.stages]


def test_stages_take_equally_long():
    plan = planned(num_stages=4)
    seconds = seconds_of(plan)
    assert max(seconds) < 1.3 * np.mean(seconds)
    cut = plan.origin.pipeline.cut
    by_operations = balanced_borders(cut_step(plan.origin.program, plan.origin.roles, 4, 4).chain, 4)
    uneven = np.add.reduceat(cut.chain.work, by_operations)
    assert uneven.max() > 1.5 * uneven.mean(), "as many operations each would not be"


def test_more_devices_take_more_of_the_work():
    plan = planned(submeshes=(1, 1, 2))
    seconds = seconds_of(plan)
    assert max(seconds) < 1.4 * np.mean(seconds)
    cut = plan.origin.pipeline.cut
    work = np.add.reduceat(cut.chain.work, plan.origin.pipeline.borders) / cut.chain.work.sum()
    assert work[2] > 1.5 * max(work[:2])


def test_what_one_axis_of_many_devices_cannot_split_does_not_stay_whole():
    """Samples, tokens and vocabulary of this head divide by 16 at most; on two axes 256 devices share it all the same."""

    def headed(params, x):
        def loss_fn(params):
            y = x
            for kernel in params["layers"]:
                y = jnp.tanh(y @ kernel)
            return jnp.mean(jax.nn.softmax(y @ params["head"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    count, width, vocabulary = 4, 4096, 16 * 1001
    params = {
        "layers": [jax.ShapeDtypeStruct((width, width), jnp.float32)] * 4,
        "head": jax.ShapeDtypeStruct((width, vocabulary), jnp.float32),
    }
    batch = jax.ShapeDtypeStruct((48 * count, 1001, width), jnp.float32)
    cluster = autopar.Cluster.of("32x8 a100")
    program, roles = autopar.parallelize(headed, cluster=cluster, batch_argnums=(1,))._roles((params, batch), {})
    cut = cut_step(program, roles, 1, count)
    few, many = (weigh_segments(cut, devices, cluster.device).chain.work.sum() for devices in (16, 256))
    assert many < few / 8
