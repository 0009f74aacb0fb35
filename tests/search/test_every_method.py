"""Every method is a point of `Auto()`'s space: by the same costs none of them is faster, whatever its settings."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.errors import AutoparError
from autopar.ir.trace.state import find_roles
from autopar.ir.trace.trace import trace_step
from autopar.mesh import logical_mesh
from autopar.search import planner
from autopar.search.one_mesh import shard_on
from autopar.search.request import Request
from tests.method_sweep import faster_methods
from tests.small_mlp import train_step as mlp_step
from tests.small_transformer import arguments, train_step

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import gpt  # noqa: E402
import wide_resnet  # noqa: E402

ROUNDING = 1 + 1e-6


def seconds_of(step, args, cluster, method):
    """Of one step as planned; None: the method cannot be kept here."""
    try:
        plan = autopar.parallelize(step, cluster=cluster, method=method, batch_argnums=1).plan(*args)
    except AutoparError:
        return None
    return plan.cost.step_seconds


@pytest.fixture
def on_one_mesh(monkeypatch):
    """`Auto()` without its pipelines: with them it is as fast at least, and plans twice as long."""
    monkeypatch.setattr(planner._Search, "in_stages", lambda search: None)


def methods(cluster):
    """One or two settings of each method; `benchmarks/methods.py` has them all."""
    devices = cluster.num_devices
    yield autopar.DataParallel(zero=1)
    yield autopar.DataParallel(zero=3, num_microbatches=2)
    yield autopar.ThreeD(data=devices, zero=3, num_microbatches=1)
    yield autopar.ThreeD(data=devices // 2, pipeline=2, zero=1, num_microbatches=4)
    yield autopar.PipelineParallel(num_stages=2, num_microbatches=4)


@pytest.mark.parametrize("text, memory", [("4 h100", "enough"), ("4 v100", "short")])
def test_none_is_faster(text, memory):
    """A scanned transformer; short of memory, some methods do not fit, and others run again or accumulate."""
    cluster = autopar.Cluster.of(text)
    args = arguments("scan", 4, batch=256)
    budget = None if memory == "enough" else 12e6
    if budget:
        cluster = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, memory_bytes=budget))
    best = seconds_of(train_step, args, cluster, autopar.Auto())
    assert best is not None
    others = {str(method): seconds_of(train_step, args, cluster, method) for method in methods(cluster)}
    assert sum(seconds is not None for seconds in others.values()) > 3
    for method, seconds in others.items():
        assert seconds is None or best <= seconds * ROUNDING, method


def test_none_is_faster_on_a_model_of_the_table():
    """One of ten models on one of four machines; `make sweep` plans them all. On (2, 2), begun with what (4,) had shown, it
    ended 1.4 % above that mesh named, though its price was right."""
    _, others, faster = faster_methods("mlp_schedule_clip", "1x4 a100")
    assert len(others) >= 8 and not faster, {method: others[method] for method in faster}


def test_the_best_mesh_is_planned_as_if_it_were_the_only_one(on_one_mesh):
    """On two axes, priced by what one axis had shown, a plan was kept that is 1.7 % slower; in a long training that counts. In
    a short one it is ZeRO, which was the fastest on one axis at 5 % above the price of others, and was not compared on two."""
    step, *args = gpt.make_step(gpt.Config(layers=3, width=96, heads=4, vocabulary=256, tokens=64, batch=16))
    methods = autopar.Auto(steps=10**6), autopar.Auto(), autopar.ShardParallel(mesh_shape=(2, 4))
    *best, named = (seconds_of(step, args, autopar.Cluster.local(), method) for method in methods)
    assert max(best) <= named * ROUNDING


def test_a_mesh_that_undoing_its_ties_makes_the_best_is_not_left_out(on_one_mesh):
    """A small Wide-ResNet on one axis: as fast as that on two axes only once each block has its own choices (1.9 %)."""
    step, *args = wide_resnet.make_step(wide_resnet.Config((1, 1, 1, 1), pixels=64, batch=512))
    methods = autopar.Auto(), autopar.ShardParallel(mesh_shape=(8,))
    best, named = (seconds_of(step, args, autopar.Cluster.of("1x8 h100"), method) for method in methods)
    assert best <= named * ROUNDING


def test_a_step_on_one_mesh_keeps_no_more_than_a_pipeline():
    """Of a scan over layers its gradient finds what is heavy to make; it was all that JAX would keep."""
    cluster, args = autopar.Cluster.of("4 h100"), arguments("scan", 4, batch=256)

    def plan(method):
        return autopar.parallelize(train_step, cluster=cluster, method=method, batch_argnums=1).plan(*args)

    whole, staged = plan(autopar.DataParallel()), plan(autopar.ThreeD(data=4, num_microbatches=1))
    assert whole.cost.step_seconds <= staged.cost.step_seconds * ROUNDING
    assert whole.cost.peak_bytes[0] <= 1.2 * staged.cost.peak_bytes[0]


@pytest.mark.parametrize("method", [autopar.ThreeD(data=2, tensor=2), autopar.PipelineParallel(num_stages=1)])
def test_a_stage_that_takes_its_batch_at_once_is_one_program(method):
    """Stated levels of recomputation make it several, and so does memory in which it has to recompute."""
    cluster, args = autopar.Cluster.of("4 h100"), arguments("scan", 4, batch=256)

    def plan(**settings):
        asked = dataclasses.replace(method, **settings)
        return autopar.parallelize(train_step, cluster=cluster, method=asked, batch_argnums=1).plan(*args)

    whole, stage = plan(), plan(recompute="cheap")
    assert whole.is_one_program and not stage.is_one_program
    assert whole.cost.step_seconds <= stage.cost.step_seconds * ROUNDING
    budget = int(0.7 * whole.cost.peak_bytes[0])
    again = plan(memory_budget_bytes=budget, offload="never")
    assert not again.is_one_program and again.cost.peak_bytes[0] <= budget
    assert not plan(num_microbatches=2).is_one_program


@pytest.mark.parametrize("devices", [3, 6])
@pytest.mark.parametrize("slower", [1, 100])
def test_toys_are_cut_into_stages_where_that_is_faster(devices, slower):
    """Neither rows nor widths divide over the devices. In one host, stages send over its own links; and a small step is cut if
    that is worth the little time which it takes to plan."""
    link = autopar.Link(1e-6 * slower, 1e10 / slower)
    device = autopar.Device("slow", 1e11 / slower, memory_bytes_per_second=1e12 / slower)
    cluster = autopar.Cluster(1, devices, device, link, autopar.Link(1e-4 * slower, 1e8 / slower))
    rows = jax.ShapeDtypeStruct((64, 61), jnp.float32)
    args = [jax.ShapeDtypeStruct((61, 61), jnp.float32)] * 6, {"x": rows, "y": rows}
    best = seconds_of(mlp_step, args, cluster, autopar.Auto(steps=math.inf if slower == 1 else 10_000))
    for count in (4, 8):
        staged = autopar.PipelineParallel(num_stages=3, num_microbatches=count)
        assert best <= seconds_of(mlp_step, args, cluster, staged) * ROUNDING, staged


def wide_step(params, batch):
    """Two products with much between them: no place to cut that pays, and most of the memory is the batch's."""

    def loss_fn(params):
        return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def test_accumulation_wins_where_memory_binds():
    """On one mesh: nothing else that fits is as fast, and more memory would be used for a step without microbatches."""
    rows, width, hidden = 4096, 16, 4096
    kernels = {"up": (width, hidden), "down": (hidden, width)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in kernels.items()}
    args = params, {name: jax.ShapeDtypeStruct((rows, width), jnp.float32) for name in ("x", "y")}
    cluster = autopar.Cluster.of("4 h100")

    def plan(budget, method=autopar.Auto):
        asked = method(memory_budget_bytes=budget)
        return autopar.parallelize(wide_step, cluster=cluster, method=asked, batch_argnums=1).plan(*args)

    roomy = plan(None)
    assert roomy.num_microbatches == 1 and len(roomy.stages) == 1
    budget = int(0.6 * max(roomy.cost.peak_bytes))
    tight = plan(budget)
    assert tight.num_microbatches > 1 and len(tight.stages) == 1
    assert max(tight.cost.peak_bytes) <= budget
    whole = (
        autopar.DataParallel(),
        autopar.ThreeD(tensor=4, num_microbatches=1),
        autopar.PipelineParallel(num_stages=2),
    )
    for method in (*whole, autopar.DataParallel(num_microbatches=2)):
        asked = dataclasses.replace(method, memory_budget_bytes=budget)
        seconds = seconds_of(wide_step, args, cluster, asked)
        assert seconds is None or tight.cost.step_seconds <= seconds * ROUNDING, asked
        if getattr(method, "num_microbatches", 2) == 1:
            assert seconds is None or tight.cost.step_seconds < seconds, asked


@pytest.mark.parametrize("budget, count", [(40.8e6, 3), (20.4e6, 5)])
def test_batches_that_are_not_even_accumulate(budget, count):
    """In odd numbers of microbatches; and as one stage in as many as are best otherwise, though no fewer fit."""
    rows, width, hidden = 4095, 16, 4096
    kernels = {"up": (width, hidden), "down": (hidden, width)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in kernels.items()}
    args = params, {name: jax.ShapeDtypeStruct((rows, width), jnp.float32) for name in ("x", "y")}
    cluster, memory = autopar.Cluster.of("3 h100"), {"memory_budget_bytes": budget}
    best = seconds_of(wide_step, args, cluster, autopar.Auto(**memory))
    for method in (
        autopar.DataParallel(num_microbatches=count, **memory),
        autopar.PipelineParallel(num_stages=1, num_microbatches=count, **memory),
    ):
        assert best <= seconds_of(wide_step, args, cluster, method) * ROUNDING, method


def test_what_divides_on_no_axis_may_divide_on_two(on_one_mesh):
    """64 rows on 6 devices: on one axis each repeats all products, which says nothing of what is left to be won."""
    cluster, args = autopar.Cluster.of("6 h100"), arguments("scan", 2, batch=64)
    best, two, one = (
        seconds_of(train_step, args, cluster, method)
        for method in (autopar.Auto(), *(autopar.ShardParallel(mesh_shape=shape) for shape in ((2, 3), (6,))))
    )
    assert two < one and best <= two * ROUNDING


def test_to_run_again_is_tried_where_microbatches_fit(on_one_mesh):
    """Half the batch at once takes so little that memory does not bind any more; the whole batch at once is faster still, and
    fits less memory, where some of its forward pass runs again."""
    cluster, args, budget = autopar.Cluster.of("4 v100"), arguments("scan", 4, batch=256), 8e6
    halves, again = (
        seconds_of(train_step, args, cluster, method)
        for method in (
            autopar.DataParallel(zero=1, num_microbatches=2, memory_budget_bytes=budget),
            autopar.PipelineParallel(num_stages=1, num_microbatches=1, memory_budget_bytes=budget),
        )
    )
    assert again < halves
    assert seconds_of(train_step, args, cluster, autopar.Auto(memory_budget_bytes=budget)) <= again * ROUNDING


def test_no_mesh_of_two_hosts_is_faster():
    """Of up to three axes, where a plan is worth any time."""
    kernels = {"up": (512, 2048), "down": (2048, 512)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in kernels.items()}
    args = params, {name: jax.ShapeDtypeStruct((64, 512), jnp.float32) for name in ("x", "y")}
    cluster = autopar.Cluster.of("2x4 v100")
    best = seconds_of(wide_step, args, cluster, autopar.Auto(steps=math.inf))
    shapes = (8,), (2, 4), (4, 2), (2, 2, 2)
    others = {shape: seconds_of(wide_step, args, cluster, autopar.ShardParallel(mesh_shape=shape)) for shape in shapes}
    assert best <= min(others.values()) * ROUNDING, others


@pytest.mark.parametrize("kind, machine", [("scan", "8 v100"), ("unrolled", "2x4 v100")])
def test_equal_layers_leave_a_small_gap(kind, machine):
    """Of the whole problem, ties undone: of the step on one mesh, and of the worst of the stages."""
    for method in (autopar.ShardParallel(mesh_shape=(2, 4)), autopar.PipelineParallel(num_stages=2)):
        cluster = autopar.Cluster.of(machine)
        parallel = autopar.parallelize(train_step, cluster=cluster, method=method, batch_argnums=1)
        assert parallel.plan(*arguments(kind, 4, batch=256)).cost.optimality_gap <= 0.01, method


def test_schedule_is_chosen_where_devices_wait():
    """Many layers on few meshes, few microbatches: each mesh takes layers from several places."""
    stages, count = 4, 16
    method = autopar.PipelineParallel(num_stages=stages, num_microbatches=count, schedule="auto")
    parallel = autopar.parallelize(train_step, cluster=autopar.Cluster.of("4 h100"), method=method, batch_argnums=1)
    plan = parallel.plan(*arguments("scan", 8, batch=128))
    waiting = plan.origin.pipeline.waiting_share
    assert plan.schedule.startswith("interleaved") and waiting < 0.8 * (stages - 1) / (count + stages - 1)


def experts_step(params, batch):
    """Layers of experts between sums that only the rows of the batch can be split along."""

    def loss_of(layers):
        x = batch
        for layer in layers:
            x = jnp.cumsum(x.reshape(len(x), -1), 1).reshape(x.shape)
            x = x + jnp.einsum(
                "gecf,efd->gecd", jax.nn.relu(jnp.einsum("gecd,edf->gecf", x, layer["up"])), layer["down"]
            )
        return jnp.mean(x**2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def test_what_no_program_has_shown_is_looked_at():
    """Experts over devices: their all-to-alls hide behind gradients, which no plan that splits samples alone shows."""
    devices, experts, tokens, width, hidden = 8, 8, 512, 256, 1024
    up, down = (jax.ShapeDtypeStruct((experts, *shape), jnp.bfloat16) for shape in ((width, hidden), (hidden, width)))
    args = [{"up": up, "down": down}] * 3, jax.ShapeDtypeStruct((devices, experts, tokens, width), jnp.bfloat16)
    program = trace_step(experts_step, args)
    roles = find_roles(program, (1,))
    cluster = dataclasses.replace(autopar.Cluster.of("1x8 h100"), intra=autopar.Link(1e-6, 4e11))
    mesh = logical_mesh(cluster, (devices,))
    request = Request(program, roles, cluster, autopar.Auto())
    before, after = (shard_on(request, mesh, explore=explore) for explore in (False, True))
    assert after.step_seconds < 0.95 * before.step_seconds
    priced = after.problem.cost(after.solution.choices)
    assert after.solution.bound <= after.solution.objective == pytest.approx(priced), "as the last problem was"
