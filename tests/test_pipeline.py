"""Pipelines compute what `jax.jit` does: a sample of models, stages and schedules; plan files, marks, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import autopar
from autopar.errors import DeviceCountError, MicrobatchError, PipelineError
from autopar.streams.instructions import Run
from tests.models.case import Case
from tests.models.registry import CASES
from tests.small_transformer import arguments, train_step
from tests.sweep import QUICK, SLOW, _host, check_faithful, reference, relative_error

MODELS = (
    "mlp_schedule_clip",
    "gpt_tied_dropout",
    "linen_encoder_decoder",
    "equinox_unet",
    "haiku_lstm",
    "lora",
    "mlp_loss_scale_bfloat16",
    "moe_top2_capacity",
    "matrix_factorization",
)
LAYOUTS = {
    "2 of 4": (8, {"num_stages": 2}),
    "4 of 2": (8, {"num_stages": 4}),
    "8 of 1": (8, {"num_stages": 8}),
    "3 of 2": (6, {"num_stages": 3}),
    "1+1+2+4": (8, {"submeshes": (1, 1, 2, 4)}),
    "2 of 1": (2, {"num_stages": 2}),
}
"""Numbers of devices, and how they are divided into stages."""
SCHEDULES, COUNTS = ("gpipe", "1f1b"), (1, 4, 3)
LONGEST, SHORT = "linen_encoder_decoder", "2 of 1"
"""The model of most equations gets the stages that are quickest to solve and to compile."""


def draw_cells(seed):
    """One cell for each model, every other layout about twice."""
    random = np.random.default_rng(seed)
    layouts = [str(layout) for layout in random.permutation([layout for layout in LAYOUTS if layout != SHORT] * 2)]
    rest = zip([name for name in MODELS if name != LONGEST], layouts, strict=False)
    return [
        (name, layout, str(random.choice(SCHEDULES)), int(random.choice(COUNTS)))
        for name, layout in [(LONGEST, SHORT), *rest]
    ]


CELLS = draw_cells(23)


def make_step(case, num_devices=8, **method):
    cluster = autopar.Cluster.local(jax.devices()[:num_devices], device=SLOW, intra=QUICK)
    method = autopar.PipelineParallel(**method)
    return autopar.parallelize(case.step, cluster=cluster, method=method, batch_argnums=(1,))


def check_steps(case: Case, compiled) -> None:
    """Three steps equal those of plain `jax.jit`."""
    state = case.state
    for batch, want in zip(case.batches, reference(case), strict=True):
        state, metrics = compiled(state, batch)
        for (path, got), leaf in zip(
            jax.tree_util.tree_leaves_with_path((state, metrics)), jax.tree.leaves(want), strict=True
        ):
            assert relative_error(_host(got), leaf) <= case.tolerance, jax.tree_util.keystr(path)


@pytest.mark.parametrize("name, layout, schedule, num_microbatches", CELLS)
def test_model(name, layout, schedule, num_microbatches):
    case = CASES[name]()
    num_devices, stages = LAYOUTS[layout]
    step = make_step(case, num_devices, schedule=schedule, num_microbatches=num_microbatches, **stages)
    compiled = step.compile(case.state, case.batches[0])
    plan = compiled.plan
    assert plan.schedule == schedule and plan.num_microbatches == num_microbatches
    assert sum(stage.submesh.num_devices for stage in plan.stages) == num_devices
    check_steps(case, compiled)


def test_the_sample_covers_what_there_is():
    models, layouts, schedules, counts = map(set, zip(*CELLS, strict=True))
    assert models == set(MODELS) and layouts == set(LAYOUTS)
    assert schedules == set(SCHEDULES) and counts == set(COUNTS)


def private_descent(key):
    """A step of private training, which clips the gradient of each sample and adds noise, and its optimizer."""
    optimizer = optax.chain(optax.contrib.differentially_private_aggregate(1.0, 0.1, key), optax.sgd(0.1))

    def loss(params, sample):
        h = sample["x"]
        for w, b in params:
            h = jnp.tanh(h @ w + b)
        return ((h - sample["y"]) ** 2).mean()

    def step(state, batch):
        params, rest = state
        values, grads = jax.vmap(jax.value_and_grad(loss), in_axes=(None, 0))(params, batch)
        updates, rest = optimizer.update(grads, rest, params)
        return (optax.apply_updates(params, updates), rest), values.mean()

    return step, optimizer


def test_typed_keys_lie_whole():
    """The two words of a key are no dim that devices could divide."""
    draws, widths = jax.random.split(jax.random.key(1), 6), (20, 32, 32, 32, 32, 6)
    shapes = zip(draws, widths, widths[1:], strict=False)
    params = [(jax.random.normal(k, (rows, columns)) / 6, jnp.zeros(columns)) for k, rows, columns in shapes]
    batch = {"x": jax.random.normal(draws[4], (16, 20)), "y": jax.random.normal(draws[5], (16, 6))}
    train_step, optimizer = private_descent(jax.random.key(2))
    state = params, optimizer.init(params)
    case = Case("private", train_step, state, (batch,))
    compiled = make_step(case, num_stages=2, num_microbatches=4).compile(state, batch)
    check_steps(case, compiled)
    (key,) = (value for value in compiled.plan.values if value.role == "state" and "rng_key" in value.name)
    assert not any(key.sharding.dims), str(key.sharding)


@pytest.mark.parametrize("scanned", (False, True))
def test_moments_lie_with_their_weights(scanned):
    """A condition around the whole update does not bring all layers together on one stage."""
    optimizer = optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-3)), 3)

    def train_step(state, batch):
        params, rest = state

        def loss(params):
            h = batch["x"]
            if scanned:
                h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, params)[0]
            else:
                for w in params:
                    h = jnp.tanh(h @ w)
            return ((h - batch["y"]) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, rest = optimizer.update(grads, rest, params)
        return (optax.apply_updates(params, updates), rest), value

    draws = jax.random.split(jax.random.key(1), 6)
    layers = [jax.random.normal(k, (32, 32)) / 6 for k in draws[:4]]
    params = jnp.stack(layers) if scanned else layers
    batch = {"x": jax.random.normal(draws[4], (16, 32)), "y": jax.random.normal(draws[5], (16, 32))}
    case = Case(f"finite {scanned}", train_step, (params, optimizer.init(params)), (batch,))
    compiled = make_step(case, 4, num_stages=2, num_microbatches=2).compile(case.state, batch)
    large = [value for value in compiled.plan.values if value.role == "state" and np.prod(value.shape) >= 32 * 32]
    of_stage = [sum(np.prod(v.shape) for v in large if v.stage == stage) for stage in (0, 1)]
    assert of_stage == [3 * 2 * 32 * 32] * 2  # weights and two moments of two layers each
    check_steps(case, compiled)


def test_plan_file(tmp_path):
    case = CASES["mlp_schedule_clip"]()
    step = make_step(case, 4, num_stages=2, num_microbatches=3, schedule="gpipe")
    plan = step.plan(case.state, case.batches[0])
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded.streams == plan.streams and loaded.cost == plan.cost and str(loaded) == str(plan)
    again = make_step(case, 4, num_stages=2, num_microbatches=3, schedule="gpipe")
    compiled = again.compile(case.state, case.batches[0], plan=loaded)
    assert compiled.plan == plan and compiled.plan.streams == plan.streams
    check_steps(case, compiled)


@functools.cache
def clipped_in_two_stages():
    """A model, and its step compiled for two devices."""
    case = CASES["mlp_schedule_clip"]()
    return case, make_step(case, 2, num_stages=2, num_microbatches=3).compile(case.state, case.batches[0])


def test_programs_are_named_as_in_the_streams():
    _, compiled = clipped_in_two_stages()
    named = {i.program for stream in compiled.plan.streams.values() for i in stream if hasattr(i, "program")}
    assert set(compiled.programs) == named
    assert {f"stage{stage}/{kind}" for stage in (0, 1) for kind in "FBU"} <= named
    assert all(isinstance(program, jax.stages.Compiled) for program in compiled.programs.values())


def test_state_stays_where_it_is():
    """The second step takes the first one's results as they lie; donated are the step's own arrays, not the user's."""
    case, compiled = clipped_in_two_stages()
    state, _ = compiled(case.state, case.batches[0])
    shardings = jax.tree.map(lambda x: x.sharding, state)
    assert shardings == compiled.in_shardings[0][0]
    before = jax.tree.leaves(state)
    state, _ = compiled(state, case.batches[1])
    assert jax.tree.map(lambda x: x.sharding, state) == shardings
    assert any(x.is_deleted() for x in before), "the old parameters' memory is taken"
    assert not any(x.is_deleted() for x in jax.tree.leaves(case.state))


def gated_layers(kind):
    """Four layers, each with a gate of one number, under a norm of all gradients: small state on every stage."""
    random = np.random.default_rng(0)
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    stack = {"kernel": random.normal(size=(4, 8, 8)) / 3, "gate": 0.5 + random.normal(size=4) / 10}
    stack = {name: leaf.astype(np.float32) for name, leaf in stack.items()}
    layers = [{name: leaf[k] for name, leaf in stack.items()} for k in range(4)]

    def layer_fn(x, layer):
        return x + layer["gate"] * jnp.tanh(x @ layer["kernel"]), None

    def loss_fn(params, batch):
        x = batch["x"]
        if kind == "scan":
            x, _ = jax.lax.scan(layer_fn, x, params)
        else:
            for layer in params:
                x, _ = layer_fn(x, layer)
        return jnp.mean((x - batch["y"]) ** 2)

    def step(state, batch):
        params, moments = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    params = jax.tree.map(jnp.asarray, stack if kind == "scan" else layers)
    batches = [{name: random.normal(size=(16, 8)).astype(np.float32) for name in "xy"} for _ in range(3)]
    why = "the gradient of a gate is a sum of terms that cancel"
    return Case(f"gated layers, {kind}", step, (params, optimizer.init(params)), tuple(batches), 1e-4, why)


def check_lying(compiled, state, batch):
    """New state lies where the step wants it."""
    new, _ = compiled(state, batch)
    for (path, leaf), wanted in zip(
        jax.tree_util.tree_leaves_with_path(new), jax.tree.leaves(compiled.in_shardings[0][0]), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim), jax.tree_util.keystr(path)


@pytest.mark.parametrize("kind, schedule", [("scan", "zb-h1"), ("unrolled", "1f1b")])
def test_small_state_stays_where_it_is(kind, schedule):
    case = gated_layers(kind)
    compiled = make_step(case, num_stages=2, num_microbatches=4, schedule=schedule).compile(case.state, case.batches[0])
    check_steps(case, compiled)
    check_lying(compiled, case.state, case.batches[0])
    update = compiled.plan.origin.pipeline.tasks.update
    cut = compiled.plan.origin.pipeline.cut.program
    homes = {p: update.home[v] for p, v in zip(cut.in_paths, cut.jaxpr.invars, strict=False) if "gate" in p}
    assert list(homes.values()) == ([0, 1] if kind == "scan" else [0, 0, 1, 1]) * 3, "the moments with the gates"


NEW_STATE = {
    "turned round": lambda old, params, made: {"a": old["b"], "b": old["c"], "c": old["a"]},
    "another's old": lambda old, params, made: {"a": old["b"], "b": params["w2"][0], "c": old["c"]},
    "not read": lambda old, params, made: {"a": made[1], "b": made[0], "c": old["c"] * 0.5},
    "from elsewhere": lambda old, params, made: {"a": old["b"] + made[1], "b": old["a"] * made[0], "c": made[1]},
    "a constant": lambda old, params, made: {"a": jnp.zeros(8), "b": old["a"] + 1, "c": old["c"]},
}


@pytest.mark.parametrize("name", NEW_STATE)
def test_state_of_no_stage_stays_where_it_is(name):
    """What replaces a piece of state may be another piece, or made on a stage that does not read the old."""
    random = np.random.default_rng(0)
    arrays = {f"w{k}": random.normal(size=(8, 8)).astype(np.float32) / 3 for k in range(4)}

    def loss_fn(params, x):
        values = []
        for k in range(4):
            x = jnp.tanh(x @ params[f"w{k}"])
            values.append(x.mean(0))
        return jnp.mean(x**2), values

    def step(state, batch):
        params, old = state
        (loss, values), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        new = NEW_STATE[name](old, params, (values[0], values[-1]))
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), new), (loss, jnp.sum(old["a"] ** 2))

    old = {name: random.normal(size=8).astype(np.float32) for name in "abc"}
    batches = tuple(random.normal(size=(16, 8)).astype(np.float32) for _ in range(3))
    case = Case(name, step, jax.tree.map(jnp.asarray, (arrays, old)), batches)
    compiled = make_step(case, num_stages=2, num_microbatches=4).compile(case.state, batches[0])
    check_steps(case, compiled)
    check_lying(compiled, case.state, batches[0])


# What runs again.


def small_transformer(kind):
    """Four layers and three batches."""
    random = np.random.default_rng(0)

    def draw(aval):
        scale = np.sqrt(aval.shape[-2]) if aval.ndim != 3 or aval.shape[0] == 4 else 1.0
        return (random.normal(size=aval.shape) / scale).astype(np.float32)

    params, batch = arguments(kind, 4)
    params, *batches = (jax.tree.map(draw, tree) for tree in (params, batch, batch, batch))
    return Case(f"small transformer, {kind}", train_step, params, tuple(batches))


@pytest.mark.parametrize(
    "kind, num_stages, schedule", [("scan", 2, "1f1b"), ("scan", 4, "gpipe"), ("unrolled", 2, "zb-h1")]
)
def test_everything_runs_again(kind, num_stages, schedule):
    case = small_transformer(kind)
    step = make_step(case, num_stages, num_stages=num_stages, num_microbatches=4, schedule=schedule, recompute="all")
    compiled = step.compile(case.state, case.batches[0])
    assert all(stage.recomputed.operations for stage in compiled.plan.stages)
    check_steps(case, compiled)


@pytest.mark.parametrize("recompute", ["all", 30.0])
def test_everything_runs_again_on_meshes(recompute):
    """What runs again communicates again, and the plan lists it."""
    case = small_transformer("unrolled")
    step = make_step(case, 8, num_stages=2, num_microbatches=2, recompute=recompute)
    compiled = step.compile(case.state, case.batches[0])
    check_faithful(compiled)
    check_steps(case, compiled)


def test_everything_runs_again_with_dropout():
    """Under the schedule whose backward pass is in two tasks."""
    case = CASES["gpt_tied_dropout"]()
    step = make_step(case, 4, num_stages=2, num_microbatches=4, schedule="zb-h1", recompute=("all", 30.0))
    check_steps(case, step.compile(case.state, case.batches[0]))


@pytest.mark.parametrize("recompute, num_microbatches", [("cheap", 4), ("all", 1), ("all", 4)])
def test_calls_into_the_host_run_once(recompute, num_microbatches):
    """Once in a step: on the whole batch where that is worked through in parts."""
    calls = []

    def step(params, batch):
        def loss_fn(params):
            x = batch["x"]
            for kernel in params:
                x = jnp.tanh(x @ kernel)
                jax.debug.callback(lambda x: calls.append(x.shape), x)
            return jnp.mean((x - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    made = marked(16)
    case = Case("calls", step, made.state, made.batches[:1])
    step = make_step(case, 2, num_stages=2, num_microbatches=num_microbatches, recompute=recompute)
    compiled = step.compile(case.state, case.batches[0])
    jax.block_until_ready(compiled(case.state, case.batches[0]))
    jax.effects_barrier()
    assert calls == [(8, 16)] * len(case.state)
    assert any(each.backward.kept.heavy for (each,) in compiled.plan.origin.pipeline.tasks.rounds) is (
        recompute == "all"
    )


# Forward only.


def test_what_a_step_passes_on_has_memory_of_its_own():
    """As with plain jit: a step that takes over the memory of one state leaves the states before it alone."""

    def make(change, donated):
        def step(state, x):
            loss, grads = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(x @ p[0]) @ p[1]) ** 2))(state["params"])
            params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
            return {"params": params} | change(state), loss

        cluster = autopar.Cluster.local(jax.devices()[:2], device=SLOW, intra=QUICK, inter=QUICK)
        method = autopar.PipelineParallel(num_stages=2, num_microbatches=2)
        return autopar.parallelize(step, cluster=cluster, method=method, batch_argnums=(1,), donate_argnums=donated)

    keep = make(lambda s: {"frozen": s["frozen"], "twice": s["frozen"]}, ())
    take = make(lambda s: {"frozen": s["frozen"] * 2, "twice": s["twice"] + 1}, (0,))
    x, ones = np.ones((4, 8), np.float32), jnp.ones((3,))
    first, _ = keep({"params": [jnp.eye(8)] * 2, "frozen": ones, "twice": ones}, x)
    second, _ = keep(first, x)
    third, _ = take(second, x)
    for state in (first, {"own": ones}):
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    np.testing.assert_array_equal(first["frozen"], np.ones(3))
    np.testing.assert_array_equal(third["frozen"] + third["twice"], np.full(3, 4.0))


def test_a_constant_is_a_result():
    """No stage reads it: it is handed back as it lies."""

    def step(params, x):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(x @ p[0]) @ p[1]) ** 2))(params)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], loss, jnp.arange(3)[::-1], np.arange(3)

    cluster = autopar.Cluster.local(jax.devices()[:2])
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=2)
    *_, made, constant = autopar.parallelize(step, cluster=cluster, method=method)(
        [jnp.eye(8)] * 2, np.ones((4, 8), np.float32)
    )
    np.testing.assert_array_equal(made, [2, 1, 0])
    np.testing.assert_array_equal(constant, [0, 1, 2])


def test_inference():
    def predict(params, x):
        for kernel in params:
            x = jnp.tanh(x @ kernel)
        return {"out": x, "largest": x.max(), "params": params[0].sum()}

    random = np.random.default_rng(0)
    params = [random.normal(size=(12, 12)).astype(np.float32) / 4 for _ in range(4)]
    x = random.normal(size=(8, 12)).astype(np.float32)
    expected = jax.jit(predict)(params, x)
    for schedule in ("inference", "gpipe", "1f1b"):
        case = Case("predict", predict, params, (x,))
        step = make_step(case, 4, num_stages=4, num_microbatches=4, schedule=schedule)
        kinds = {event.kind for event in step.plan(params, x).timeline().events}
        assert "B" not in kinds and "F" in kinds
        for got, want in zip(jax.tree.leaves(step(params, x)), jax.tree.leaves(expected), strict=True):
            assert relative_error(_host(got), _host(want)) < 1e-6


# Samples that wait for all forward passes.


def balanced_experts():
    """Two routers: each expert's share of the samples times its mean probability, also the first one's share and the last's
    probability, which are on two stages."""
    random = np.random.default_rng(5)
    kernels = [(random.normal(size=(8, 8)) / 3).astype(np.float32) for _ in range(6)]
    x, y = (random.normal(size=(8, 8)).astype(np.float32) for _ in range(2))

    def loss_fn(kernels, batch):
        h, shares, means = batch["x"], [], []
        for router, kernel in zip(kernels[::2], kernels[1::2], strict=True):
            p = jax.nn.softmax(h @ router)
            best = jax.nn.one_hot(p.argmax(-1), 8)
            shares.append(best.mean(0))
            means.append(p.mean(0))
            h = jnp.tanh(h @ kernel) * (best * p).sum(-1, keepdims=True) + h
        balance = sum((f * p).sum() for f, p in zip(shares, means, strict=True)) + (shares[0] * means[-1]).sum()
        return ((h - batch["y"]) ** 2).mean() + 0.5 * balance, balance

    def step(kernels, batch):
        (loss, balance), grads = jax.value_and_grad(loss_fn, has_aux=True)(kernels, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, kernels, grads), (loss, balance)

    return Case("balanced experts", step, kernels, ({"x": x, "y": y},) * 3)


@pytest.mark.parametrize("num_devices, schedule", [(2, "1f1b"), (2, "gpipe"), (3, "zb-h1")])
def test_balanced_experts(num_devices, schedule, recwarn):
    case = balanced_experts()
    step = make_step(case, num_devices, num_stages=num_devices, num_microbatches=4, schedule=schedule)
    compiled = step.compile(case.state, case.batches[0])
    check_steps(case, compiled)
    assert any("all forward passes run first" in str(w.message) for w in recwarn) == (schedule != "gpipe")
    assert "stage0/M" in compiled.programs, "the first share is sent to the last stage"
    for stream in compiled.plan.streams.values():
        kinds = "".join(i.program.split("/")[1][0] for i in stream if isinstance(i, Run))
        assert re.fullmatch("i?F{4}M+[BW]+U*", kinds)


def test_two_towers():
    """Each sample against all others, behind all forward passes: the towers are two stages."""
    case = CASES["two_towers"]()
    compiled = make_step(case, 2, num_stages=2, num_microbatches=4, schedule="gpipe").compile(
        case.state, case.batches[0]
    )
    check_steps(case, compiled)
    between = {name.split("/")[0] for name in compiled.programs if name.split("/")[1].startswith("M")}
    assert between == {"stage0", "stage1"}, "each tower compares its own samples with the other's"


# What is refused.


def test_batch_norm():
    case = CASES["resnet_batchnorm"]()
    with pytest.raises(MicrobatchError, match="cannot be worked through in microbatches exactly"):
        make_step(case, 4, num_stages=4, num_microbatches=4).plan(case.state, case.batches[0])
    step = make_step(case, 4, num_stages=4)
    with pytest.warns(UserWarning, match="num_microbatches is left open.*run one after the other"):
        compiled = step.compile(case.state, case.batches[0])
    check_steps(case, compiled)


def test_too_many_stages():
    case = CASES["matrix_factorization"]()
    step = autopar.parallelize(
        case.step,
        cluster=autopar.Cluster(8, 32, SLOW, QUICK),
        method=autopar.PipelineParallel(num_stages=256, num_microbatches=1),
        batch_argnums=(1,),
    )
    with pytest.raises(PipelineError, match="cut into so many stages(.*\n)*.*num_stages=256(.*\n)*.*use fewer") as info:
        step.plan(case.state, case.batches[0])
    assert info.value.num_stages == 256


@pytest.mark.parametrize(
    "num_devices, method",
    [(8, {"num_stages": 3}), (6, {"num_stages": 4}), (2, {"num_stages": 4}), (8, {"submeshes": (1, 2, 4)})],
    ids=["8 in 3", "6 in 4", "2 in 4", "7 of 8"],
)
def test_devices_that_do_not_divide(num_devices, method):
    case = CASES["mlp_schedule_clip"]()
    with pytest.raises(DeviceCountError, match="the stages do not fit the cluster") as info:
        make_step(case, num_devices, **method).plan(case.state, case.batches[0])
    assert info.value.available == num_devices != info.value.wanted


def test_neither_a_number_of_stages_nor_marks():
    case = CASES["mlp_schedule_clip"]()
    with pytest.raises(PipelineError, match="the number of stages is missing"):
        make_step(case, 2).plan(case.state, case.batches[0])


# Marks.


def marked(width, num_layers=4, after=(1,), wrap=lambda loss: loss, around=lambda layers: layers):
    """An MLP with marks behind some of its layers; `around` is put about all of them."""
    random = np.random.default_rng(0)
    params = [random.normal(size=(width, width)).astype(np.float32) / np.sqrt(width) for _ in range(num_layers)]
    x, y = (random.normal(size=(8, width)).astype(np.float32) for _ in range(2))

    def layers(params, x):
        for number, kernel in enumerate(params):
            x = jnp.tanh(x @ kernel)
            x = autopar.mark_stage(x) if number in after else x
        return x

    def step(params, batch):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((around(layers)(p, batch["x"]) - batch["y"]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return Case(f"marked {width} {after}", step, params, ({"x": x, "y": y},) * 3)


@pytest.mark.parametrize("width, num_microbatches", [(72, 1), (16, 4)])
def test_stages_end_at_marks(width, num_microbatches):
    case = marked(width, after=(0, 2))
    step = make_step(case, 3, num_microbatches=num_microbatches)
    compiled = step.compile(case.state, case.batches[0])
    assert len(compiled.plan.stages) == 3
    check_steps(case, compiled)
    params, _ = compiled(case.state, case.batches[0])
    assert [next(iter(p.devices())).id for p in params] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    "after, num_stages, products",
    [((0,), 4, [[1, 1, 1, 1]]), ((0, 2), 2, [[1, 3], [3, 1]]), ((2,), 3, [[1, 2, 1], [2, 1, 1]])],
)
def test_marks_and_another_number_of_stages(after, num_stages, products):
    case = marked(72, after=after)
    plan = make_step(case, num_stages, num_stages=num_stages).plan(case.state, case.batches[0])
    forward = [each.forward for (each,) in plan.origin.pipeline.tasks.rounds]
    assert [[e.primitive.name for e in eqns].count("dot_general") for eqns in forward] in products


def test_marks_make_chunks():
    case = marked(72, after=(0, 1, 2))
    step = make_step(case, 2, schedule="interleaved", num_microbatches=4)
    compiled = step.compile(case.state, case.batches[0])
    assert len(compiled.plan.stages) == 4
    check_steps(case, compiled)
    with pytest.raises(PipelineError, match="3 chunks do not divide into stages of 2"):
        case = marked(72, after=(0, 1))
        make_step(case, 2, schedule="interleaved", num_microbatches=4).plan(case.state, case.batches[0])


def test_a_mark_on_the_last_value_is_none():
    def step(params, batch):
        def loss_fn(params):
            return autopar.mark_stage(
                jnp.mean((autopar.mark_stage(batch["x"] @ params[0]) @ params[1] - batch["y"]) ** 2)
            )

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    case = marked(72, num_layers=2)
    with pytest.raises(PipelineError, match="not every mark stands between two stages"):
        make_step(dataclasses.replace(case, step=step), 3).plan(case.state, case.batches[0])


@pytest.mark.parametrize(
    "around",
    [
        pytest.param(jax.jit, id="jit"),
        pytest.param(lambda layers: jax.vmap(layers, (None, 0)), id="vmap"),
        pytest.param(jax.checkpoint, id="checkpoint"),
    ],
)
def test_marks_within_transformations(around):
    case = marked(72, num_layers=2, after=(0,), around=around)
    step = make_step(case, 2, num_microbatches=4)
    plan = step.plan(case.state, case.batches[0])
    assert len(plan.stages) == 2 and plan.origin.pipeline.borders == (0, *plan.origin.pipeline.cut.chain.marks)
    params, _ = step(case.state, case.batches[0])
    # What one checkpoint around both stages computes again is computed by the first of them, which so holds all of it.
    homes = [0, 0] if around is jax.checkpoint else [0, 1]
    assert [next(iter(p.devices())).id for p in params] == homes


def test_mark_is_an_identity():
    x = jnp.arange(6.0).reshape(2, 3)

    def f(x):
        return jnp.sin(autopar.mark_stage(jnp.cos(x)) * 2).sum()

    def g(x):
        return jnp.sin(jnp.cos(x) * 2).sum()

    for transform in (
        lambda f: f,
        jax.jit,
        jax.grad,
        lambda f: jax.vmap(f),
        lambda f: jax.vmap(f, 1),
        lambda f: jax.jit(jax.vmap(jax.value_and_grad(f))),
        lambda f: lambda x: jax.jvp(f, (x,), (x,)),
        lambda f: jax.grad(jax.checkpoint(f)),
    ):
        jax.tree.map(np.testing.assert_array_equal, transform(f)(x), transform(g)(x))
    tree = {"a": x, "b": (x.astype(jnp.int32), None)}
    jax.tree.map(np.testing.assert_array_equal, autopar.mark_stage(tree), tree)
    jaxpr = str(jax.make_jaxpr(autopar.mark_stage)(tree))
    assert jaxpr.count("mark_stage") == 1 and autopar.mark_stage(()) == ()


# Compiling.


def test_equal_stages_are_compiled_once():
    """The first stage embeds, the last has the loss; those between are equal."""
    num_stages, compiled_stages = 6, 3
    case = marked_layers(num_stages)
    step = make_step(case, num_stages, num_stages=num_stages, num_microbatches=4)
    compiled = step.compile(case.state, case.batches[0])
    kinds = [name.split("/")[1] for name in compiled.programs]
    assert len(kinds) == num_stages * len(set(kinds))
    assert compiled.executable.num_compiled <= compiled_stages * len(set(kinds))
    check_steps(case, compiled)


def test_stages_are_not_moved_out_of_the_cache(tmp_path):
    """Equal programs that come from JAX's compilation cache run on each stage."""
    flags = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in flags}
    case = marked_layers(4)
    try:
        for name, value in flags.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        for _ in range(2):
            step = make_step(case, 4, num_stages=4, num_microbatches=4)
            check_steps(case, step.compile(case.state, case.batches[0]))
            jax.clear_caches()
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def marked_layers(num_layers):
    """A scan over equal layers."""
    case = marked(32, num_layers=num_layers, after=())
    stacked = np.stack(case.state)

    def step(params, batch):
        def loss_fn(params):
            x, _ = jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), batch["x"], params)
            return jnp.mean((x - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return params - 0.1 * grads, loss

    return dataclasses.replace(case, name=f"scan {num_layers}", step=step, state=stacked)


@pytest.mark.parametrize("num_stages, schedule", [(2, "zb-h1"), (4, "1f1b")])
def test_scanned_layers_equal_their_unrolled_twins(num_stages, schedule):
    scanned, unrolled = marked_layers(8), marked(32, num_layers=8, after=())
    results = []
    for case in (scanned, unrolled):
        step = make_step(case, 4, num_stages=num_stages, num_microbatches=4, schedule=schedule)
        state, losses = case.state, []
        for batch in case.batches:
            state, loss = step(state, batch)
            losses.append(float(loss))
        results.append((np.stack([np.asarray(layer) for layer in state]), losses))
    np.testing.assert_allclose(*[np.asarray(r[0]) for r in results], rtol=0, atol=1e-6)
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-6)


def accumulating(num_groups, pick):
    """Gradients that the user adds up over groups of samples, of a loss that reads by index."""
    case = marked(32, num_layers=4, after=())

    def step(params, batch):
        def loss_fn(params, group):
            x = group["x"]
            for kernel in params:
                x = jnp.tanh(x @ kernel)
            return jnp.mean((pick(x) - pick(group["y"])) ** 2)

        def add(sums, group):
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss_fn)(params, group)), None

        groups = jax.tree.map(lambda x: x.reshape(num_groups, -1, *x.shape[1:]), batch)
        zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0), params))
        (loss, grads), _ = jax.lax.scan(add, zeros, groups)
        return jax.tree.map(lambda p, g: p - 0.1 * g / num_groups, params, grads), loss / num_groups

    return dataclasses.replace(case, name=f"{num_groups} groups", step=step)


def test_gradients_accumulated_by_the_user():
    """Each of the user's groups is a microbatch, and its forward and backward are cut."""
    case = accumulating(4, lambda x: x[jnp.arange(x.shape[0]), jnp.arange(x.shape[0]) % 7])
    compiled = make_step(case, 4, num_stages=2, num_microbatches=4).compile(case.state, case.batches[0])
    assert all(stage.layers for stage in compiled.plan.stages)
    check_faithful(compiled)
    check_steps(case, compiled)


@pytest.mark.parametrize(
    "method",
    [autopar.PipelineParallel(num_stages=2, num_microbatches=4), autopar.ShardParallel(mesh_shape=(2, 2))],
    ids=["pipeline", "one mesh"],
)
def test_loops_that_end_for_each_sample(method):
    """`vmap` of a while, in the model and in the random numbers that are drawn until one is accepted."""
    plain = marked(32, num_layers=4, after=())

    def root(a):
        return jax.lax.while_loop(lambda x: jnp.abs(x * x - a) > 1e-4, lambda x: 0.5 * (x + a / x), a)

    def step(params, batch):
        noise = jax.random.gamma(jax.random.key(3), 0.7, batch["x"].shape)
        target = jax.vmap(root)(1 + jnp.abs(batch["y"][:, 0]) * jnp.arange(1.0, 9.0))
        batch = {"x": batch["x"] * noise, "y": jnp.broadcast_to(target[:, None], batch["y"].shape)}
        return plain.step(params, batch)

    case = dataclasses.replace(plain, name="loops", step=step)
    cluster = autopar.Cluster.local(jax.devices()[:4], device=SLOW, intra=QUICK)
    parallel = autopar.parallelize(step, cluster=cluster, method=method, batch_argnums=(1,))
    check_steps(case, parallel.compile(case.state, case.batches[0]))
