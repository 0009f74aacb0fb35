"""Run by `test_gpu.py` in a Python of its own: plans compiled for 8 H100 that are not there; prints what was found, as JSON.

In:     `python on_gpus.py FOLDER`: the folder that XLA's compiler for GPUs is installed in, or "" if Python finds it anyway.
"""

import json
import os
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
if sys.argv[1]:
    sys.path.append(sys.argv[1])
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import autopar
from autopar import Cluster, DataParallel, PipelineParallel
from autopar.verify.hlo import read_module
from autopar.verify.host_copies import executed_copies, planned_copies
from autopar.verify.targets import GPU_OPTIONS, find_target
from tests import written_out as layers_written_out

LAYERS, WIDTH, TOKENS, BATCH = 4, 256, 512, 64
MATRICES = 12


def loss_of(params, x):
    def block(x, layer):
        hidden = jax.nn.gelu(x @ layer["up"])
        return x + hidden @ layer["down"], None

    x, _ = jax.lax.scan(block, x, params)
    return jnp.mean(x**2)


def train_step(params, batch):
    loss, grads = jax.value_and_grad(loss_of)(params, batch["x"])
    largest = jnp.max(jnp.abs(batch["x"]).astype(jnp.bfloat16))  # as products of 8-bit floats have it
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), (loss, largest)


def arguments():
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {"up": array(LAYERS, WIDTH, 4 * WIDTH), "down": array(LAYERS, 4 * WIDTH, WIDTH)}
    return params, {"x": array(BATCH, TOKENS, WIDTH)}


def found_of(method):
    """What XLA says of a plan."""
    checked = autopar.parallelize(train_step, cluster=Cluster.of("8 h100"), method=method).plan(*arguments()).verify()
    return {
        "ok": checked.ok,
        "text": str(checked),
        "predicted": checked.predicted_bytes,
        "compiled": checked.compiled_bytes,
        "async": checked.async_share,
        "bytes": {kind: n for p in checked.programs for kind, n in p.emitted.items()},
        "planned": {kind: n for p in checked.programs for kind, n in p.planned.items()},
    }


def written_out():
    """What XLA lets overlap in it: shares of the reductions' seconds."""
    weights = [jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 8
    batch = {"x": jax.ShapeDtypeStruct((32768, 4096), jnp.bfloat16)}
    made = autopar.parallelize(layers_written_out.train_step, cluster=Cluster.of("8 h100"), method=DataParallel(zero=3))
    (program,) = made.plan(weights, batch).verify().programs
    sums = [c for c in program.collectives if c.kind == "reduce-scatter"]
    return {"hidden": sum(min(c.seconds, c.hidden_seconds) for c in sums) / sum(c.seconds for c in sums)}


def accumulated():
    """Bytes of its all-reduces in two microbatches, planned and compiled, and how often each runs."""
    weights = [jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 8
    batch = {"x": jax.ShapeDtypeStruct((32768, 4096), jnp.bfloat16)}
    method = DataParallel(zero=0, num_microbatches=2)
    (program,) = (
        autopar.parallelize(layers_written_out.train_step, cluster=Cluster.of("8 h100"), method=method)
        .plan(weights, batch)
        .verify()
        .programs
    )
    sums = [c for c in program.collectives if c.kind == "all-reduce"]
    return {
        "planned": program.planned["all-reduce"],
        "emitted": program.emitted["all-reduce"],
        "times": max(c.times for c in sums),
        "count": len(sums),
    }


def strided(cluster):
    """How often each kind of cuDNN's kernels is called in a step of three strided convolutions."""

    def train_step(kernels, batch):
        def loss_of(kernels):
            x = batch["x"]
            for kernel in kernels:
                dims = ("NHWC", "HWIO", "NHWC")
                x = jax.nn.relu(jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=dims))
            return jnp.mean(x**2)

        loss, grads = jax.value_and_grad(loss_of)(kernels)
        return jax.tree.map(lambda p, g: p - 0.1 * g, kernels, grads), loss

    kernels = [jax.ShapeDtypeStruct((3, 3, 32, 32), jnp.float32)] * 3
    batch = {"x": jax.ShapeDtypeStruct((256, 64, 64, 32), jnp.float32)}
    step = autopar.parallelize(train_step, cluster=cluster, method=DataParallel(zero=0))
    (program,) = step.compile(kernels, batch).programs.values()
    return Counter(re.findall(r'custom_call_target="__cudnn\$conv(\w+)"', program.as_text()))


def train_in_layers(policy):
    """The same, where a policy says what the layers keep for their gradients."""

    def loss_of(params, x):
        def block(x, layer):
            x = checkpoint_name(x, "entering")
            return x + jax.nn.gelu(x @ layer["up"]) @ layer["down"], None

        return jnp.mean(jax.lax.scan(jax.checkpoint(block, policy=policy), x, params)[0] ** 2)

    def train_step(params, batch):
        loss, grads = jax.value_and_grad(loss_of)(params, batch["x"])
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return train_step


def unrolled(params, batch):
    """The same layers, one after another."""

    def loss_of(params, x):
        for k in range(LAYERS):
            x = x + jax.nn.gelu(x @ params["up"][k]) @ params["down"][k]
        return jnp.mean(x**2)

    loss, grads = jax.value_and_grad(loss_of)(params, batch["x"])
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def chosen(step):
    """What XLA says of a plan in which activations wait on the hosts, for nothing else fits."""

    def planned(**how):
        return autopar.parallelize(step, cluster=Cluster.of("8 h100"), method=DataParallel(**how)).plan(*arguments())

    free = planned()
    budget = 0.7 * max(free.cost.peak_bytes)
    plan = planned(memory_budget_bytes=budget)
    checked = plan.verify()
    (program,) = checked.programs
    return {
        "activations": plan.offloaded_activations,
        "budget": budget,
        "free": max(free.verify().compiled_bytes),
        "predicted": max(checked.predicted_bytes),
        "compiled": max(checked.compiled_bytes),
        "planned": program.planned,
        "emitted": program.emitted,
    }


def with_state(policy):
    """What XLA says of a step whose momentum is in host memory between steps; `policy`: for the layers' activations."""

    def loss_of(params, x):
        def block(x, layer):
            x = checkpoint_name(x, "entering")
            for weights in layer.values():
                x = jnp.tanh(x @ weights)
            return x, None

        return jnp.mean(jax.lax.scan(jax.checkpoint(block, policy=policy), x, params)[0] ** 2)

    def train_step(state, batch):
        params, momentum = state[0], jax.device_put(state[1], jax.memory.Space.Device)
        loss, grads = jax.value_and_grad(loss_of)(params, batch["x"])
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum)
        return (params, jax.device_put(momentum, jax.memory.Space.Host)), loss

    params = {f"{k}": jax.ShapeDtypeStruct((LAYERS, 2048, 2048), jnp.float32) for k in range(MATRICES)}
    batch = {"x": jax.ShapeDtypeStruct((BATCH, 8, 2048), jnp.float32)}
    step = autopar.parallelize(train_step, cluster=Cluster.of("8 h100"), method=DataParallel(zero=0))
    checked = step.plan((params, params), batch).verify()
    (program,) = checked.programs
    return {
        "predicted": max(checked.predicted_bytes),
        "compiled": max(checked.compiled_bytes),
        "planned": program.planned,
        "emitted": program.emitted,
    }


def parameters_there(scanned, budget):
    """What XLA says of a GPT that fits with its parameters on the hosts only; `budget`: in bytes of all parameters."""
    import gpt

    sizes = {"layers": 6, "width": 1280, "heads": 10, "vocabulary": 4096, "tokens": 256, "batch": 64}
    step, state, batch = gpt.make_step(gpt.Config(**sizes, scanned=scanned, dtype=jnp.bfloat16))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) // 3  # beside them are two moments of each

    method = DataParallel(zero=0, memory_budget_bytes=budget * size)
    plan = autopar.parallelize(step, cluster=Cluster.of("8 h100"), method=method).plan(state, batch)
    checked = plan.verify()
    (program,) = checked.programs
    return {
        "size": size,
        "predicted": max(checked.predicted_bytes),
        "compiled": max(checked.compiled_bytes),
        "planned": program.planned,
        "emitted": program.emitted,
    }


def copies_of(program):
    """Bytes that a compiled program copies to and from the host's memory."""
    return executed_copies(read_module(program.as_text()))


def memory_of(policy, cluster):
    """Where XLA and the plan have it."""
    step = autopar.parallelize(train_in_layers(policy), cluster=cluster, method=DataParallel())
    compiled = step.compile(*arguments())
    (program,), (stage,) = compiled.programs.values(), compiled.plan.attached.pipeline.stages
    found, cost = program.memory_analysis(), compiled.plan.cost
    return {
        "host": found.host_temp_size_in_bytes,
        "device": found.temp_size_in_bytes,
        "planned_host": cost.host_bytes,
        "planned_device": max(cost.peak_bytes),
        "copies": copies_of(program),
        "planned_copies": planned_copies(stage.tasks[0].body, stage.mesh),
    }


def with_experts(params, batch):
    """A step of experts without capacity."""

    def loss_of(params):
        pick = (batch["x"] @ params["router"]).argmax(-1)
        order, sizes = jnp.argsort(pick), jnp.bincount(pick, length=8).astype(jnp.int32)
        hidden = jnp.tanh(jax.lax.ragged_dot(batch["x"][order], params["up"], sizes))
        return jnp.mean(
            jnp.zeros_like(batch["x"]).at[order].set(jax.lax.ragged_dot(hidden, params["down"], sizes)) ** 2
        )

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def rows_that_travel():
    """Over slow links rows go to experts that are on several devices: what is planned, and what XLA sends."""

    def of(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {"router": of(64, 8), "up": of(8, 64, 128), "down": of(8, 128, 64)}
    by_experts = dict.fromkeys(("params/up", "params/down"), jax.sharding.PartitionSpec("x"))
    link = autopar.Link(1e-9, 1e8)
    cluster = Cluster(1, 8, Cluster.of("8 h100").device, link, link)
    method = autopar.ShardParallel(mesh_shape=(8,), constraints=by_experts)
    checked = (
        autopar.parallelize(with_experts, cluster=cluster, method=method).plan(params, {"x": of(1024, 64)}).verify()
    )
    (program,) = checked.programs
    return {"planned": program.planned, "emitted": program.emitted, "async": checked.async_share}


def zero3_and_fsdp(target):
    """XLA's bytes of three layers on one device, by hand and as planned: scanned, and unrolled."""
    import fsdp

    config = fsdp.Llama(3, 256, 1024, heads=8, vocabulary=1024, tokens=128, batch=8, dtype=jnp.float32)
    forms = {"scanned": config, "unrolled": replace(config, scanned=False)}
    return {form: fsdp.compare(each, target.devices, GPU_OPTIONS)[:2] for form, each in forms.items()}


def main():
    found = {"zero": found_of(DataParallel(zero=3)), "experts": rows_that_travel(), "written out": written_out()}
    found["accumulated"] = accumulated()
    found["stages"] = found_of(PipelineParallel(num_stages=2, num_microbatches=2))
    # The whole way of a compiled step touches no device either.
    target = find_target("h100", Cluster.of("8 h100"))
    found["fsdp"] = zero3_and_fsdp(target)
    cluster = Cluster.local(devices=list(target.devices), device=Cluster.of("8 h100").device)
    policies = jax.checkpoint_policies
    offloads = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["entering"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    step = autopar.parallelize(
        train_in_layers(offloads), cluster=cluster, method=PipelineParallel(num_stages=2, num_microbatches=2)
    )
    compiled = step.compile(*arguments())
    found["programs"] = sorted(compiled.programs)
    sizes = {name: program.memory_analysis() for name, program in compiled.programs.items()}
    found["left"] = [sizes[f"stage{k}/F"].host_output_size_in_bytes for k in range(2)]
    found["planned_left"] = compiled.plan.cost.host_bytes
    found["fetched"] = [copies_of(compiled.programs[f"stage{k}/B"])["from host"] for k in range(2)]
    found["offloaded"] = memory_of(offloads, cluster)
    found["saved"] = memory_of(policies.save_only_these_names("entering"), cluster)
    found["chosen"] = {"scanned": chosen(train_step), "unrolled": chosen(unrolled)}
    found["with state"] = {"state": with_state(policies.nothing_saveable), "both": with_state(offloads)}
    found["parameters"] = {"scanned": parameters_there(True, 1.85), "unrolled": parameters_there(False, 1.4)}
    found["strided"] = strided(cluster)
    found["entering"] = LAYERS * BATCH // 8 * TOKENS * WIDTH * 4
    print(json.dumps(found))


if __name__ == "__main__":
    main()
