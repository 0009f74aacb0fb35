"""Predicts the steps of convolutional nets of published runs.

In:     `Run` whose model is a `Net`, `Machine`.
Out:    `net_parts`: seconds of kernels, of communication and of the update, and bytes.
Method: if each device has whole samples, autopar plans the gradient of one microbatch on one device, and the step is
        composed of that. A net that was sharded by a solver is planned by autopar's solver on the same mesh.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import wide_resnet
from parts import make_train_step, state_types
from published_layers import Step
from published_machines import Machine
from published_memory import state_bytes
from published_nets import Net
from published_runs import Run
from published_sending import data_seconds
from published_work import PHASES, Work, planned

import autopar
from autopar.cost import kernel_seconds
from autopar.cost.kernels import MemoryPass
from autopar.mesh import Cluster, Device, Link

UPDATE_BYTES = 20
"""Moved by an update of SGD with momentum for each parameter of 32 bits: it, its gradient and momentum read, two written."""


def net_parts(run: Run, machine: Machine) -> tuple[float, float, float, float]:
    """Seconds of a step: computing, sending gradients and parameters, updating; and bytes on one device."""
    assert run.net is not None
    if run.mesh is not None:
        seconds, needed = planned_whole(run.net, run.batch, run.count, run.mesh or (run.devices,), machine)
        return seconds, 0.0, 0.0, needed
    # Libraries normalize a batch in one kernel as compilers do, and launches run ahead of such large ones.
    run = replace(run, compiled=True)
    work = gradient_work(run.net, run.microbatch, run.dtype, machine.device, machine.intra)
    again = ("forward",) if run.recompute == "full" else ()
    params, blocks = run.net.params(), sum(run.net.depths)
    forward, whole = (
        work.compute(phases, machine.device, run) / blocks for phases in (("forward",), (*PHASES, *again))
    )
    once, with_each = data_seconds(run, machine, params, blocks, forward, whole)
    update = kernel_seconds(MemoryPass(UPDATE_BYTES * params / (run.shards if run.zero else 1)), machine.device)
    kept = 0 if again else work.kept_bytes
    needed = params * state_bytes(run) + kept + work.working_bytes
    return run.count * blocks * whole, once + run.count * with_each, update, needed


@functools.cache
def gradient_work(net: Net, samples: int, dtype: str, device: Device, link: Link) -> Work:
    """What the gradient of so many samples takes on one device."""
    return planned(gradient_step(net, samples, dtype), 1, device, link)


def gradient_step(net: Net, samples: int, dtype: str) -> Step:
    """The gradient of so many samples."""
    config = net.config(samples)
    storage = jnp.dtype(dtype if dtype in ("float32", "float16", "bfloat16") else "bfloat16")
    types = jax.eval_shape(functools.partial(wide_resnet.init_params, config))
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, storage), types)
    images = jax.ShapeDtypeStruct((samples, net.pixels, net.pixels, 3), storage)
    labels = jax.ShapeDtypeStruct((samples,), jnp.int32)

    def step(params: Any, images: Any, labels: Any) -> Any:
        batch = {"images": images, "labels": labels}
        return jax.value_and_grad(functools.partial(wide_resnet.loss_of, config=config))(params, batch)

    return Step(step, (params, images, labels), {})


@functools.cache
def planned_whole(
    net: Net, batch: int, count: int, mesh_shape: tuple[int, ...], machine: Machine
) -> tuple[float, float]:
    """Seconds and peak bytes of a step that autopar shards over all devices, in so many microbatches."""
    devices = math.prod(mesh_shape)
    config = net.config(batch)
    optimizer = optax.sgd(0.1, momentum=0.9)
    step = make_train_step(functools.partial(wide_resnet.loss_of, config=config), optimizer)
    state = state_types(jax.eval_shape(functools.partial(wide_resnet.init_params, config)), optimizer)
    images = jax.ShapeDtypeStruct((batch, net.pixels, net.pixels, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    per_host = min(machine.per_host, devices)
    cluster = Cluster(devices // per_host, per_host, machine.device, machine.intra, machine.inter)
    method = autopar.ShardParallel(
        mesh_shape=mesh_shape,
        num_microbatches=count,
        microbatch_semantics="per_microbatch",
        memory_budget_bytes=1 << 50,
    )
    plan = autopar.parallelize(step, cluster=cluster, method=method).plan(state, {"images": images, "labels": labels})
    return plan.cost.step_seconds, float(max(plan.cost.peak_bytes))
