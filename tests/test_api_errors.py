"""Bad input raises an error of ours that says what was given, what is wrong, what to do."""

from __future__ import annotations

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar import Auto, Cluster, DataParallel, Device, LogicalMesh, PipelineParallel, Plan, ShardParallel, ThreeD
from autopar.errors import (
    AutoparError,
    BatchError,
    ClusterError,
    ConstraintError,
    DeviceCountError,
    InfeasibleError,
    PipelineError,
    PlanFileError,
    RuleError,
    SolverError,
    StalePlanError,
    StructureChangedError,
    TraceError,
)
from autopar.report.page import page_of
from autopar.streams.schedules import GPipe
from tests import small_mlp


def train_step(state, batch):
    def loss(params):
        return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


def state():
    return {"v": np.ones((8, 8), np.float32), "w": np.ones((16, 8), np.float32)}


def batch(size=32):
    return {"x": np.ones((size, 16), np.float32), "y": np.ones((size, 8), np.float32)}


def mesh(**settings):
    return ShardParallel(mesh_shape=(2, 4), **settings)


def raises(kind, *parts):
    """The error's message holds its three labels and all `parts`."""
    return pytest.raises(
        kind, match="(?s)" + "".join(f"(?=.*{re.escape(p)})" for p in ("given:", "wrong:", "do:", *parts))
    )


def planned(method=None, fn=train_step, arguments=None, **settings):
    return autopar.parallelize(fn, method=method or Auto(), **settings).plan(*(arguments or (state(), batch())))


# Batch and devices


def test_the_batch_does_not_divide():
    with raises(BatchError, "batch/x with 30 samples, 8 devices", "30 is no multiple of 8", "Auto()") as caught:
        planned(DataParallel(), arguments=(state(), batch(30)))
    assert caught.value.size == 30


@pytest.mark.parametrize("zero", [0, 3])
def test_a_microbatch_does_not_divide(zero):
    wrong = (
        "batch/x with 32 samples, 8 microbatches, each on all 8 devices",
        "32 is no multiple of 64",
        "fewer microbatches",
    )
    with raises(BatchError, *wrong) as caught:
        planned(DataParallel(zero=zero, num_microbatches=8))
    assert caught.value.size == 32
    assert planned(DataParallel(zero=zero, num_microbatches=4)).num_microbatches == 4


def test_a_microbatch_does_not_divide_over_the_data_axis():
    method = ThreeD(data=4, pipeline=2, num_microbatches=16)
    with pytest.warns(
        UserWarning, match="batch/x has 32 samples, no multiple of 64 .16 microbatches.*4 devices of the axis"
    ):
        planned(method)


def test_microbatches_left_open_divide_over_the_data_axis(recwarn):
    assert planned(ThreeD(data=4, pipeline=2), arguments=(state(), batch(16))).num_microbatches == 4
    assert not [w for w in recwarn if "samples" in str(w.message)]


@pytest.mark.parametrize("method", [DataParallel(zero=3), ThreeD(data=8)], ids=["data parallel", "three axes"])
@pytest.mark.parametrize("size, told", [(16, True), (64, False)])
def test_chunks_that_do_not_divide(size, told, method, recwarn):
    """A loop of the user's own over four chunks of samples."""

    def step(params, x):
        def chunk(grads, rows):
            more = jax.grad(lambda params: jnp.mean(jnp.tanh(jnp.tanh(rows @ params["w"]) @ params["v"]) ** 2))(params)
            return jax.tree.map(jnp.add, grads, more), None

        grads, _ = jax.lax.scan(chunk, jax.tree.map(jnp.zeros_like, params), x.reshape(4, -1, 16))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    planned(method, step, (state(), np.ones((size, 16), np.float32)))
    texts = [str(w.message) for w in recwarn if "do alike" in str(w.message)]
    assert len(texts) == told
    wanted = "of each device's time", "at test_api_errors.py", "4 parts along the samples"
    assert all(part in text for text in texts for part in wanted)


@pytest.mark.parametrize("method", [DataParallel(), ThreeD(data=8)], ids=["data parallel", "three axes"])
@pytest.mark.parametrize("turns, told", [(5, True), (0, False)], ids=["products of gradients", "gradients"])
def test_work_without_samples(turns, told, method, recwarn):
    """An optimizer that makes gradients orthogonal by products; a mere update is what data parallelism does alike."""

    def orthogonal(g):
        g = g / (jnp.linalg.norm(g) + 1e-6)
        for _ in range(turns):
            g = 1.5 * g - 0.5 * g @ g.T @ g
        return g

    def step(params, x):
        grads = jax.grad(lambda params: jnp.mean(jnp.tanh(x @ params["w"] @ params["v"]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * orthogonal(g), params, grads)

    planned(method, step, (state(), np.ones((16, 16), np.float32)))
    texts = [str(w.message) for w in recwarn if "do alike" in str(w.message)]
    assert len(texts) == told and all("it has no samples" in text and "(orthogonal)" in text for text in texts)


def test_the_automatic_plan_takes_any_batch():
    assert planned(mesh(), arguments=(state(), batch(30))).cost.step_seconds > 0


def test_two_batches():
    """Each is split by itself. Where each comes back, either may be state."""
    arguments = (state(), np.ones((8, 2)), np.ones((16, 2)))
    plan = planned(DataParallel(), lambda s, a, b: (s, a.sum() + b.sum()), arguments)
    assert plan.shardings[0][1:] == (P("x", None), P("x", None))
    with raises(BatchError, "argument 1 (a): leading dim 8; argument 2 (b): leading dim 16", "batch_argnums"):
        planned(DataParallel(), lambda s, a, b: (s, a * 2, b * 2), arguments)


@pytest.mark.parametrize("method", [Auto(), DataParallel(), autopar.PipelineParallel(num_stages=2)], ids=str)
def test_a_batch_without_rows(method):
    with raises(BatchError, "batch/x: float32[0,16]", "no sample", "batch_argnums") as caught:
        planned(method, arguments=(state(), batch(0)))
    assert caught.value.size == 0


@pytest.mark.parametrize(
    "method", [DataParallel(), autopar.PipelineParallel(num_stages=2, num_microbatches=2)], ids=str
)
def test_a_batch_whose_arrays_differ_in_rows(method):
    def step(s, graph):
        def loss(scale):  # a node waits for all that are sent to it
            sent = jnp.tanh(scale * graph["nodes"])[graph["senders"]]
            return jnp.sum(jax.ops.segment_sum(sent, graph["senders"], 8) ** 2)

        return s, jax.grad(loss)(2.0)

    graph = {"nodes": np.ones((8, 2), np.float32), "senders": np.zeros(24, int)}
    told = "differ in their first dim: 8 rows in graph/nodes, 24 rows in graph/senders", "an argument of its own"
    with raises(BatchError, "no batch to split", *told):
        planned(method, step, (state(), graph))
    whole = "rows belong together", "batch_argnums=()"
    with raises(BatchError, "graph (8 rows in graph/nodes, 24 rows in graph/senders) of 8 samples", *whole):
        planned(ShardParallel(num_microbatches=3), step, (state(), graph), batch_argnums=1)
    with raises(BatchError, "3 devices", *whole):
        cluster = Cluster(1, 3, Device("toy", 1e9, 1e9, 1e9))
        planned(DataParallel(), step, (state(), graph), batch_argnums=1, cluster=cluster)


@pytest.mark.parametrize("method", [DataParallel(), ShardParallel(num_microbatches=2)], ids=str)
def test_no_batch(method):
    def step(s):
        return jax.tree.map(jnp.tanh, s)

    with raises(BatchError, "no batch to split", "batch_argnums", "holds them in its state", "ShardParallel()"):
        planned(method, step, (state(),))
    assert planned(ShardParallel(), step, (state(),)).cost.step_seconds > 0


@pytest.mark.parametrize("shape", [(4, 4), (3,), LogicalMesh((2, 2))])
def test_the_mesh_has_another_number_of_devices(shape):
    with raises(DeviceCountError, "8 devices") as caught:
        planned(ShardParallel(mesh_shape=shape))
    assert caught.value.available == 8 and caught.value.wanted == np.prod(getattr(shape, "shape", shape))


@pytest.mark.parametrize(
    "method, wanted",
    [
        (PipelineParallel(num_stages=16), 16),
        (PipelineParallel(num_stages=4, submeshes=(4, 4, 4, 4)), 16),
        (ThreeD(data=2, tensor=2, pipeline=4), 16),
        (ShardParallel(mesh_shape=(4, 4)), 16),
    ],
)
def test_more_devices_than_there_are(method, wanted):
    with raises(
        DeviceCountError, "8 devices", f"--xla_force_host_platform_device_count={wanted} PJRT_NPROC=32"
    ) as caught:
        planned(method)
    assert (caught.value.available, caught.value.wanted) == (8, wanted)
    with pytest.raises(DeviceCountError) as caught:
        planned(method, cluster=Cluster.of("8 h100"))
    assert "XLA_FLAGS" not in str(caught.value), "virtual devices are no way to more GPUs"


def test_stages_that_do_not_share_evenly():
    with raises(DeviceCountError, "there are 8 devices, and 3 stages do not get equally many", "submeshes=(1, 2, ...)"):
        planned(PipelineParallel(num_stages=3))
    with raises(DeviceCountError, "2 stages of 2 devices take 4", "with the rest as it is, data=2") as caught:
        planned(ThreeD(tensor=2, pipeline=2))
    assert "submeshes=" not in str(caught.value), "it has none"


def test_interleaved_counts_meshes():
    with raises(PipelineError, "num_stages=8, a schedule that makes 2 stages of each: 16"):
        planned(PipelineParallel(num_stages=8, schedule="interleaved", num_microbatches=8))
    plan = planned(PipelineParallel(num_stages=2, schedule="interleaved", num_microbatches=2))
    assert "4 stages on 2 meshes, 2 on each, schedule interleaved" in str(plan)
    busy = [row[3] for row in page_of(plan).tables[0].rows]
    assert len(busy) == 4 and "0 s" not in busy


@pytest.mark.parametrize("method", [DataParallel(), ShardParallel(num_microbatches=4)])
def test_a_smaller_last_batch(method):
    with raises(BatchError, "drop it, or pad it"):
        planned(method, arguments=(state(), batch(31)))


def test_a_cluster_larger_than_this_process():
    cluster = Cluster(hosts=2, devices_per_host=8, device=Device("toy", 1e9, 1e9, 1e9))
    step = autopar.parallelize(train_step, cluster=cluster, method=ShardParallel(mesh_shape=(16,)))
    assert step.plan(state(), batch()).mesh.num_devices == 16
    with raises(DeviceCountError, "8 devices", "16"):
        step(state(), batch())


# Constraints and budgets


@pytest.mark.parametrize("in_the_step", [False, True])
def test_axes_of_a_dim_in_another_order_than_the_mesh(in_the_step):
    spec = P(("y", "x"))

    def constrained(state, batch):
        if in_the_step:
            axes = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
            batch = batch | {"x": jax.lax.with_sharding_constraint(batch["x"], jax.NamedSharding(axes, spec))}
        return train_step(state, batch)

    with pytest.warns(UserWarning, match=r"lays dim 0 out over \('y', 'x'\).*It is split over \('x', 'y'\)"):
        planned(mesh(constraints={} if in_the_step else {"batch/x": spec}), constrained)


def test_what_a_stage_cannot_hold_is_named():
    with raises(InfeasibleError, "stage 0 of 2", "test_api_errors.py:") as caught:
        planned(PipelineParallel(num_stages=2, num_microbatches=2, memory_budget_bytes=500))
    assert "unknown line" not in str(caught.value)


@pytest.mark.parametrize(
    "constraints, parts",
    [
        ({"state/u": P("x")}, ["constraints={'state/u': ", "state/w, state/v"]),
        ({"state/*/kernel": P("x")}, ["none of the 4 arguments"]),
        ({"state/w": P("model")}, ["no axis 'model'", "'x', 'y'"]),
        ({"state/w": P("x", None, "y")}, ["3 entries, the array 2 dims"]),
        ({"state/w": P("x", "x")}, ["axis 'x' twice"]),
        ({"state/w": 3}, ["3 is of type int, not PartitionSpec"]),
    ],
)
def test_a_constraint_that_fits_nothing(constraints, parts):
    with raises(ConstraintError, *parts) as caught:
        planned(mesh(constraints=constraints))
    assert caught.value.spec == next(iter(constraints.values()))


def test_a_constraint_that_does_not_divide():
    with raises(ConstraintError, "dim 0 has length 30, which 4 devices do not divide", "batch/x"):
        planned(mesh(constraints={"batch/x": P("y")}), arguments=(state(), batch(30)))


def test_contradictory_pins():
    with raises(
        InfeasibleError,
        "constraint 'state/*' pins state/w to P('x',)",
        "constraint 'state/w' pins state/w to P('y',)",
        "no sharding of state/w",
        "drop one of them",
    ) as caught:
        planned(mesh(constraints={"state/*": P("x"), "state/w": P("y")}))
    assert caught.value.path == "state/w"


def test_equal_pins_are_no_contradiction():
    plan = planned(mesh(constraints={"state/*": P("x"), "state/w": P("x", None)}))
    assert str(plan.shardings[0][0]["w"]) == str(P("x", None))


def test_a_pin_against_the_method():
    with raises(InfeasibleError, "constraint 'state/w' pins state/w to P('x',)", "method=DataParallel(zero=0)"):
        planned(DataParallel(constraints={"state/w": P("x")}))


def test_an_impossible_budget():
    with raises(
        InfeasibleError,
        "memory_budget_bytes=300",
        "bytes are alive on a device",
        "more than there are",
        "jax.checkpoint",
    ) as caught:
        planned(mesh(memory_budget_bytes=300))
    assert caught.value.budget_bytes == 300 < caught.value.needed_bytes


# Arguments


def test_a_leaf_that_is_no_array():
    with raises(TraceError, "batch/y", "'labels', a str", "static_argnums"):
        autopar.parallelize(train_step)(state(), {**batch(), "y": "labels"})
    with raises(TraceError, "state/w", "an"):
        planned(arguments=({**state(), "w": object()}, batch()))
    with raises(TraceError, "batch/y", "a OfAnotherLibrary of float99", "numpy.asarray"):
        autopar.parallelize(train_step)(state(), {**batch(), "y": OfAnotherLibrary()})
    with warnings.catch_warnings(), raises(TraceError, "batch/y", "next(...)"):
        warnings.simplefilter("ignore")  # of JAX
        autopar.parallelize(train_step)(state(), {**batch(), "y": iter([1])})


class OfAnotherLibrary:
    dtype = "float99"

    def __array__(self):
        return np.zeros(3)


@pytest.fixture(scope="module")
def compiled():
    return autopar.parallelize(train_step, method=DataParallel()).compile(state(), batch())


@pytest.mark.parametrize(
    "arguments, line",
    [
        ((state(), {"x": batch()["x"]}), "batch/y is missing; it was float32[32,8]."),
        ((state(), {**batch(), "z": np.ones(3, np.float32)}), "batch/z is float32[3]; there was no such argument."),
        ((state(), batch(16)), "batch/x is float32[16,16]; it was float32[32,16]."),
        (({**state(), "w": np.ones((16, 8), np.int32)}, batch()), "state/w is int32[16,8]; it was float32[16,8]."),
        ((state(),), "batch/x is missing; it was float32[32,16]."),
        ((tuple(state().values()), batch()), "state/v is missing"),
    ],
)
def test_another_structure_at_the_second_call(compiled, arguments, line):
    with raises(StructureChangedError, line, "call the step itself"):
        compiled(*arguments)


def test_the_step_itself_takes_another_structure():
    step = autopar.parallelize(train_step, method=DataParallel())
    for size in (32, 16):
        assert np.isfinite(step(state(), batch(size))[1])


def test_64_bit_numbers_become_32_as_in_jit(compiled):
    wide = jax.tree.map(lambda x: x.astype(np.float64), batch())
    assert np.isfinite(compiled(state(), wide)[1])


# Tracing


def test_a_closed_over_tracer():
    def outer(scale):
        return autopar.parallelize(lambda s, b: (s, jnp.sum(b["x"]) * scale))(state(), batch())[1]

    with raises(TraceError, "closes over a traced value", "pass it to"):
        jax.jit(outer)(2.0)


def test_arguments_that_are_traced():
    with raises(TraceError, "argument `state/v` of `train_step` is being traced", "outside of other transformations"):
        jax.jit(lambda s: autopar.parallelize(train_step)(s, batch()))(state())


@pytest.mark.parametrize("method", [Auto(), autopar.PipelineParallel(num_stages=2, num_microbatches=2)], ids=str)
def test_arguments_that_are_traced_after_a_call(method):
    step = autopar.parallelize(train_step, method=method)
    step(state(), batch())
    with raises(TraceError, "argument `state/v` of `train_step` is being traced", "outside of other transformations"):
        jax.jit(lambda s: step(s, batch()))(state())


def test_the_users_own_exception_passes():
    def broken(state, batch):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        autopar.parallelize(broken)(state(), batch())


def test_a_step_that_was_written_for_each_device():
    def for_each(state, batch):
        return jax.lax.pmean(train_step(state, batch), "batch")

    with pytest.raises(NameError, match="unbound axis name") as info:
        autopar.parallelize(for_each)(state(), batch())
    assert any("leave out `pmean`" in note for note in info.value.__notes__)


# Plan files


def test_a_corrupt_plan_file(tmp_path):
    path = tmp_path / "plan.json"
    planned(DataParallel()).save(path)
    path.write_text(path.read_text()[:-400])
    with raises(PlanFileError, str(path), "not whole JSON", "plan again"):
        Plan.load(path)


def test_a_stale_plan_file(tmp_path):
    planned(DataParallel()).save(tmp_path / "plan.json")
    with raises(StalePlanError, "batch/x: float32[32,16] in the plan, float32[64,16] now", "plan again"):
        autopar.parallelize(train_step, method=DataParallel()).compile(
            state(), batch(64), plan=Plan.load(tmp_path / "plan.json")
        )


# Settings


@pytest.mark.parametrize(
    "make, kind, part",
    [
        (lambda: autopar.parallelize(train_step, method="zero"), AutoparError, "method='zero'"),
        (
            lambda: autopar.parallelize(train_step, method=DataParallel),
            AutoparError,
            "pass DataParallel(...), an instance",
        ),
        (lambda: autopar.parallelize(train_step, cluster="8x8 h100"), ClusterError, "Cluster.of("),
        (lambda: autopar.parallelize(train_step, runtime="ray"), ClusterError, "pass cluster=Cluster.ray("),
        (lambda: ShardParallel(mesh_shape=3), AutoparError, "mesh_shape=3"),
        (lambda: DataParallel(zero=4), AutoparError, "zero=4"),
        (lambda: autopar.PipelineParallel(num_stages=0), AutoparError, "PipelineParallel(num_stages=0)"),
        (lambda: autopar.PipelineParallel(schedule="zigzag"), AutoparError, "schedule='zigzag'"),
        (lambda: autopar.PipelineParallel(3, submeshes=(1, 1)), AutoparError, "there are 2 submeshes"),
        (lambda: autopar.ThreeD(tensor=0), AutoparError, "ThreeD(tensor=0)"),
        (lambda: planned(autopar.PipelineParallel()), PipelineError, "pass num_stages="),
        (lambda: planned(mesh(memory_budget_bytes=0)), AutoparError, "must be a number, more than 0"),
        (lambda: ShardParallel(solver="gurobi"), SolverError, "'highs', 'cbc'"),
        (lambda: DataParallel(solver_seconds=0), AutoparError, "must be a number, more than 0"),
        (lambda: ShardParallel(memory_budget_bytes="80GB"), AutoparError, "memory_budget_bytes='80GB'"),
        (lambda: DataParallel(constraints=[P("x")]), ConstraintError, "it is of type list"),
        (lambda: autopar.PipelineParallel(submeshes=2), AutoparError, "submeshes=2"),
        (lambda: autopar.PipelineParallel(submeshes=()), AutoparError, "submeshes=()"),
        (lambda: autopar.PipelineParallel(submeshes=(1, 0)), AutoparError, "more than 0"),
        (lambda: autopar.PipelineParallel(schedule=3), AutoparError, "schedule=3"),
        (lambda: autopar.ThreeD(schedule=GPipe), AutoparError, "it is a class"),
        (lambda: Device("x", "a lot"), ClusterError, "peak_flops='a lot'"),
        (lambda: Device("x", {"float32": "a lot"}), ClusterError, "peak_flops='a lot'"),
        (lambda: autopar.Link(1e-6, "fast"), ClusterError, "'fast'"),
        (lambda: Cluster(device="h100"), ClusterError, "device='h100'"),
        (lambda: Cluster.of(8), ClusterError, "'8' is not hosts x devices"),
        (lambda: Cluster.local(devices=4), ClusterError, "devices=4"),
        (lambda: Cluster.local(devices="cpu"), ClusterError, "devices='cpu'"),
        (lambda: Cluster.local(devices=[0, 1]), ClusterError, "jax.devices()[:4]"),
        (lambda: autopar.sharding_rule(3), RuleError, "it is of type int"),
        (lambda: autopar.sharding_rule(train_step), RuleError, "it is of type function"),
        (lambda: planned().diff("p.json"), AutoparError, "plan.diff('p.json')"),
        (lambda: autopar.fit(train_step, state(), [], save_every=0), AutoparError, "fit(save_every=0)"),
        (lambda: autopar.fit(train_step, state(), [], save_every=1.5), AutoparError, "fit(save_every=1.5)"),
        (lambda: autopar.fit(train_step, state(), [], keep=0), AutoparError, "fit(keep=0)"),
        (lambda: autopar.fit(train_step, state(), [], on_failure="retry"), AutoparError, "on_failure='retry'"),
    ],
)
def test_settings(make, kind, part):
    with raises(kind, part):
        make()


@pytest.mark.parametrize("method", [ShardParallel, DataParallel, autopar.PipelineParallel])
def test_constraints_may_be_left_none(method):
    assert method(constraints=None).options().constraints == {}


def test_create_state_of_another_structure(compiled):
    step = autopar.parallelize(train_step, method=DataParallel())
    with raises(StructureChangedError, "no plan yet", "example="):
        step.create_state(state)
    step(state(), batch())
    with raises(StructureChangedError, "does not fit"):
        step.create_state(lambda: {"w": jnp.ones((16, 8))})


@pytest.mark.parametrize(
    "method",
    [
        autopar.Auto(),
        autopar.ShardParallel(),
        autopar.DataParallel(),
        autopar.PipelineParallel(num_stages=2),
        autopar.ThreeD(data=4, tensor=6, pipeline=2),
    ],
    ids=lambda method: type(method).__name__,
)
def test_several_kinds_of_devices(method):
    step = autopar.parallelize(small_mlp.train_step, cluster=Cluster.of("2x8 h100 + 4x8 a100"), method=method)
    with pytest.raises(autopar.errors.NotBuiltYetError, match="several kinds of devices") as info:
        step.plan(small_mlp.make_params(2, 16), small_mlp.make_batch(96, 16))
    advised = re.findall(r'Cluster\.of\("(.*?)"\)', str(info.value))
    assert [Cluster.of(text).num_devices for text in advised] == [16, 32], "what it says to do can be done"
