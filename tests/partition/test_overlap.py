"""What XLA for GPUs is told about a program: found by what is passed, for there is no GPU here."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import autopar
from autopar import Cluster, DataParallel, ShardParallel, ThreeD
from autopar.intra_op.fuse import small_bytes
from autopar.partition import overlap
from autopar.partition.overlap import compile_lowered, overlap_options
from autopar.partition.program import run_body
from tests import written_out

LAYERS, WIDTH = 6, 64
WIDE = 4096


def step(w, batch):
    def loss_of(w):
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], w)[0] ** 2)

    loss, grads = jax.value_and_grad(loss_of)(w)
    return w - 0.1 * grads, loss


def types(width=WIDTH):
    return jax.ShapeDtypeStruct((LAYERS, width, width), "float32"), {
        "x": jax.ShapeDtypeStruct((4096, width), "float32")
    }


class Lowered:
    """A lowered program that remembers how it was compiled; `known` are the options that this XLA has."""

    def __init__(self, known=None):
        self.known, self.tried = known, []

    def compile(self, compiler_options=None):
        self.tried.append(compiler_options)
        unknown = [name for name in compiler_options or {} if self.known is not None and name not in self.known]
        if unknown:
            raise jax.errors.JaxRuntimeError(f"INVALID_ARGUMENT: No such compile option: '{unknown[0]}'")
        return compiler_options


def fsdp(**options):
    """Weights are split and gathered layer by layer: for all of them at once there is no memory."""
    method = DataParallel(zero=3, memory_budget_bytes=900_000_000, **options)
    plan = autopar.parallelize(step, cluster=Cluster.of("4 h100"), method=method).plan(*types(WIDE))
    return plan.origin.pipeline.stages[0].sharded.body, plan.mesh


@pytest.mark.parametrize("dim", [1, 2])
def test_parts_are_gathered_one_behind_the_other_on_cpus(dim):
    """XLA for CPUs gathers another dim than the first row by row."""
    body, mesh = fsdp(constraints={"w": PartitionSpec(*[None] * dim, "x")})
    local = [jax.ShapeDtypeStruct(s.local_shape(v.aval.shape, mesh), v.aval.dtype) for v, s in body.inputs]
    sizes = dict(mesh.axis_sizes)
    emitted = str(jax.make_jaxpr(lambda *a: run_body(body, a, sizes, "cpu"), axis_env=list(sizes.items()))(*local))
    for name in ("all_gather_dimension", "scatter_dimension"):
        assert {int(d) for d in re.findall(rf"{name}=(\d+)", emitted)} == {0}, name


@pytest.mark.parametrize("dim, platform, num_pinned", [(2, "cuda", 7 + 2), (1, "cuda", 7), (2, "cpu", 0)])
def test_stacks_of_weights_stay_as_they_lie(dim, platform, num_pinned):
    """XLA would turn a whole stack before a loop that gathers its rows along another dim than the first: beside the seven
    rows that the loops read and write, the operands of two gathers are told."""
    body, mesh = fsdp(constraints={"w": PartitionSpec(*[None] * dim, "x")})
    local = [jax.ShapeDtypeStruct(s.local_shape(v.aval.shape, mesh), v.aval.dtype) for v, s in body.inputs]
    sizes = dict(mesh.axis_sizes)
    emitted = jax.make_jaxpr(lambda *a: run_body(body, a, sizes, platform), axis_env=list(sizes.items()))(*local)
    assert "all_gather" in str(emitted) and str(emitted).count("layout_constraint[") == num_pinned


def test_a_layer_is_gathered_as_one_message_and_ahead():
    found = overlap_options(*fsdp())
    layer = WIDE * WIDE * 4
    assert found["xla_gpu_enable_latency_hiding_scheduler"] is True
    assert found["xla_gpu_all_gather_combine_threshold_bytes"] == layer
    assert found["xla_gpu_enable_pipelined_all_gather"] is True
    assert found["xla_gpu_reduce_scatter_combine_threshold_bytes"] == layer // 4, "XLA counts results"
    assert "xla_gpu_enable_pipelined_all_reduce" not in found, "the loop has none"


def test_a_forward_pass_is_not_done_a_trip_ahead():
    """Nothing of it depends on what a loop over microbatches carries: XLA would gather activations in the trip before, and
    work out again what the backward pass reads."""

    def sorting(weights, batch):
        def loss_of(weights):
            return jnp.mean((jnp.sort(batch["x"] @ weights["up"], -1) @ weights["down"]) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss

    weight = jax.ShapeDtypeStruct((WIDE, WIDE), "float32")
    given = {"up": weight, "down": weight}, {"x": jax.ShapeDtypeStruct((2, 8, WIDE), "float32")}
    pins = {"*up*": PartitionSpec(None, "x"), "*down*": PartitionSpec(None, "x")}
    method = ShardParallel(mesh_shape=(2,), num_microbatches=2, constraints=pins)
    plan = autopar.parallelize(sorting, cluster=Cluster.of("2 h100"), method=method).plan(*given)
    assert any(c.kind == "all-gather" and c.times == 2 and c.bytes == 8 * WIDE * 4 for c in plan.cost.collectives)
    found = overlap_options(plan.origin.pipeline.stages[0].sharded.body, plan.mesh)
    assert "xla_gpu_all_gather_combine_threshold_bytes" in found
    assert "xla_gpu_enable_pipelined_all_gather" not in found


def test_messages_of_a_program_without_loops_stay_apart():
    """XLA would combine those that were placed one layer apart, and send them all behind the backward pass."""

    def unrolled(weights, batch):
        def loss_of(weights):
            x = batch["x"]
            for w in weights:
                x = jnp.tanh(x @ w)
            return jnp.mean(x**2)

        loss, grads = jax.value_and_grad(loss_of)(weights)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], loss

    stack, batch = types(WIDE)
    given = [jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype)] * LAYERS, batch
    plan = autopar.parallelize(unrolled, cluster=Cluster.of("4 h100"), method=DataParallel(zero=3)).plan(*given)
    found, small = overlap_options(plan.origin.pipeline.stages[0].sharded.body, plan.mesh), int(small_bytes(plan.mesh))
    assert small < WIDE * WIDE * 4
    assert found["xla_gpu_all_gather_combine_threshold_bytes"] == small
    assert found["xla_gpu_reduce_scatter_combine_threshold_bytes"] == small // 4
    assert "xla_gpu_enable_pipelined_all_gather" not in found, "there is no loop"


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="later XLA lacks some of the names, which are then left out"
)
def test_this_xla_knows_every_option():
    """Set on CPU, where they mean nothing: a name that XLA does not have would raise."""
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(4))
    assert lowered.compile(compiler_options=overlap_options(*fsdp())) is not None


def test_no_communication_no_options():
    plan = autopar.parallelize(step, cluster=Cluster.of("1 h100")).plan(*types())
    assert overlap_options(plan.origin.pipeline.stages[0].sharded.body, plan.mesh) == {}


@pytest.mark.parametrize("is_scanned", [True, False])
def test_copies_to_the_host_overlap_with_kernels(is_scanned):
    """Those of rows are pipelined into the next trip; none is part of a CUDA graph, which runs them one by one."""
    policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")

    def offloading(weights, batch):
        def loss_of(weights):
            block = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None), policy=policy)
            x = batch["x"]
            if is_scanned:
                return jnp.mean(jax.lax.scan(block, x, weights)[0] ** 2)
            for k in range(LAYERS):
                x, _ = block(x, weights[k])
            return jnp.mean(x**2)

        loss, grads = jax.value_and_grad(loss_of)(weights)
        return weights - 0.1 * grads, loss

    plan = autopar.parallelize(offloading, cluster=Cluster.of("1 h100")).plan(*types())
    found = overlap_options(plan.origin.pipeline.stages[0].sharded.body, plan.mesh)
    assert found["xla_gpu_enable_latency_hiding_scheduler"] is True
    assert found.get("xla_gpu_enable_pipelined_host_offloading", False) is is_scanned
    assert found["xla_gpu_graph_min_graph_size"] >= 2**20


def test_only_on_gpus():
    options = {"xla_gpu_a": True}
    assert compile_lowered(Lowered(), options, "gpu") == options
    assert not compile_lowered(Lowered(), options, "cpu") and not compile_lowered(Lowered(), options, "tpu")


def test_what_this_xla_does_not_know_is_left_out():
    lowered = Lowered({"xla_gpu_a", "xla_gpu_c"})
    options = {"xla_gpu_a": True, "xla_gpu_b": 3, "xla_gpu_c": 4}
    assert compile_lowered(lowered, options, "gpu") == {"xla_gpu_a": True, "xla_gpu_c": 4}
    assert len(lowered.tried) == 2 and options["xla_gpu_b"] == 3


def test_another_error_is_not_swallowed():
    class Broken(Lowered):
        def compile(self, compiler_options=None):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")

    with pytest.raises(jax.errors.JaxRuntimeError, match="no memory"):
        compile_lowered(Broken(), {"xla_gpu_a": True}, "gpu")


def test_what_the_user_sets_is_left_alone(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_a=false --xla_dump_to=/tmp/x")
    assert compile_lowered(Lowered(), {"xla_gpu_a": True, "xla_gpu_b": True}, "gpu") == {"xla_gpu_b": True}


@pytest.mark.parametrize("method", [DataParallel(zero=3), ThreeD(data=2, tensor=1, pipeline=2, num_microbatches=2)])
def test_both_runtimes_pass_them(method, monkeypatch):
    """Each program is compiled through the same door, with the options of its own body."""
    seen = []

    def spy(lowered, options, platform, given=None):
        seen.append((dict(options), platform))
        return lowered.compile()

    monkeypatch.setattr("autopar.runtime.compile.compile_lowered", spy)
    arguments = jnp.ones((LAYERS, WIDTH, WIDTH)), {"x": jnp.ones((64, WIDTH))}
    compiled = autopar.parallelize(step, cluster=Cluster.local(jax.devices()[:4]), method=method).compile(*arguments)
    assert seen and all(platform == "cpu" for _, platform in seen)
    told = [options for options, _ in seen if options]
    assert told and all(options["xla_gpu_enable_latency_hiding_scheduler"] for options in told)
    if len(compiled.plan.stages) == 1:
        assert told == [
            overlap.overlap_options(compiled.plan.origin.pipeline.stages[0].sharded.body, compiled.plan.mesh)
        ]


@pytest.mark.parametrize("platform, is_told", [("cuda", True), ("cpu", False)])
def test_what_a_loop_over_microbatches_reduces_stays_in_it_and_apart(platform, is_told):
    """Combined, all gradients of a microbatch would be one message at the end of its backward pass."""
    given = (
        [jax.ShapeDtypeStruct((WIDE, WIDE), "float32")] * 8,
        {"x": jax.ShapeDtypeStruct((32768, WIDE), jnp.bfloat16)},
    )
    method = DataParallel(zero=0, num_microbatches=2)
    plan = autopar.parallelize(written_out.train_step, cluster=Cluster.of("8 h100"), method=method).plan(*given)
    body, sizes = plan.origin.pipeline.stages[0].sharded.body, dict(plan.mesh.axis_sizes)
    assert any(c.kind == "all-reduce" and c.times == 2 for c in plan.cost.collectives), "reduced in the loop"
    local = [jax.ShapeDtypeStruct(s.local_shape(v.aval.shape, plan.mesh), v.aval.dtype) for v, s in body.inputs]
    emitted = str(jax.make_jaxpr(lambda *a: run_body(body, a, sizes, platform), axis_env=list(sizes.items()))(*local))
    summed = re.findall(r"(\w+):bf16\S+ = psum", emitted)
    held = re.findall(r"optimization_barrier (\w+)", emitted)
    held = [name for name in summed if name in held and len(re.findall(rf"\b{name}\b", emitted)) == 2]
    assert len(summed) == 8 and len(held) == (8 if is_told else 0), "read through a barrier alone"
    small = int(small_bytes(plan.mesh))
    assert overlap_options(body, plan.mesh)["xla_gpu_all_reduce_combine_threshold_bytes"] == small
