"""A step that fails while it runs: one error that says where, no state lost that need not be, and the next call works."""

from __future__ import annotations

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import DonatedError, StepError, StructureChangedError
from tests.sweep import QUICK, SLOW

WIDTH, LAYERS = 16, 4


class Host:
    """A callback that raises at its n-th call."""

    def __init__(self):
        self.calls, self.raises_at = 0, 0

    def __call__(self, x):
        self.calls += 1
        if self.calls == self.raises_at:
            raise ValueError(f"call {self.calls} is one too many")
        return x

    def fail_in(self, calls):
        self.raises_at = self.calls + calls


def one(host, x):
    """The number 1, by way of the host."""
    return jax.pure_callback(host, jax.ShapeDtypeStruct((), x.dtype), jnp.sum(jax.lax.stop_gradient(x) * 0) + 1)


def make_step(host, where):
    @jax.custom_vjp
    def backward_calls(x):
        return x

    backward_calls.defvjp(lambda x: (x, None), lambda _, g: (g * one(host, g),))
    opaque = autopar.sharding_rule("b d -> b d")(lambda x: jax.pure_callback(host, x, x))
    opaque_linear = jax.custom_vjp(opaque)
    opaque_linear.defvjp(lambda x: (opaque(x), None), lambda _, g: (g,))

    def step(params, batch):
        def loss_fn(params):
            x = batch["x"]
            for number, kernel in enumerate(params):
                x = jnp.tanh(x @ kernel)
                if number == 2:
                    match where:
                        case "forward":
                            x = x * jax.lax.stop_gradient(one(host, x))
                        case "backward":
                            x = backward_calls(x)
                        case "update":
                            jax.debug.callback(host, jnp.sum(x))
                        case "opaque":
                            x = opaque_linear(x)
                        case "nan":
                            x = jnp.sqrt(x + batch["shift"])
            return jnp.mean((x - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def arguments(shift=2.0):
    random = np.random.default_rng(0)
    params = [random.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4 for _ in range(LAYERS)]
    x = random.normal(size=(8, WIDTH)).astype(np.float32)
    return params, {"x": x, "y": np.zeros_like(x), "shift": np.full((8, 1), shift, np.float32)}


def parallel(step, devices, method=None, **settings):
    cluster = autopar.Cluster.local(jax.devices()[:devices], device=SLOW, intra=QUICK)
    method = method or autopar.PipelineParallel(
        num_stages=4, num_microbatches=4, microbatch_semantics="per_microbatch", **settings
    )
    return autopar.parallelize(step, cluster=cluster, method=method, batch_argnums=(1,))


def check_next_call(step, train, state, batch):
    """The step with the state as it was equals plain `jax.jit`."""
    expected = jax.jit(step)([np.asarray(p) for p in state], batch)
    got = train(state, batch)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    jax.effects_barrier()


# Callbacks


@pytest.mark.parametrize(
    "where, devices, schedule",  # each with each, but not with each pair
    [
        ("forward", 4, "1f1b"),
        ("forward", 8, "gpipe"),
        ("backward", 8, "1f1b"),
        ("opaque", 4, "gpipe"),
    ],
)
def test_a_callback_raises(where, devices, schedule):
    host = Host()
    step = make_step(host, where)
    train = parallel(step, devices, schedule=schedule)
    params, batch = arguments()
    state, _ = train(params, batch)
    host.fail_in(2)
    with pytest.raises(StepError, match="call .* is one too many") as caught:
        train(state, batch)
    error = caught.value
    assert isinstance(error.__cause__, ValueError) and not error.state_lost and error.results is None
    # The backward's callback reads a cotangent alone: it is where that is made.
    place = (3, "backward", 1) if where == "backward" else (2, "forward", 1)
    if where == "opaque":  # it may also begin the next stage
        stages = train.latest().plan.attached.pipeline.stages
        place = (next(k for k, stage in enumerate(stages) if "pure_callback" in str(stage.program.jaxpr)), "forward", 1)
    assert (error.stage, error.task, error.microbatch) == place
    assert re.search(r"`pure_callback at test_failures.py:\d+ \((one|loss_fn|<lambda>)\)", error.source)
    assert not any(p.is_deleted() for p in state)
    check_next_call(step, train, state, batch)


def test_the_first_of_several_is_told():
    host = Host()
    train = parallel(make_step(host, "backward"), 8)
    params, batch = arguments()
    train(params, batch)
    host.__class__ = type("Always", (Host,), {"__call__": lambda self, x: 1 / 0})
    with pytest.raises(StepError, match="stage 3, backward of microbatch 0") as caught:
        train(params, batch)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("method", [None, autopar.ShardParallel((4,))])
def test_a_callback_without_results_raises_when_all_is_done(method):
    """It reads a sum over the whole batch, so it runs beside the update: the results are there, and are in the error."""
    host = Host()
    step = make_step(host, "update")
    train = parallel(step, 4, method)
    params, batch = arguments()
    state, _ = train(params, batch)
    expected, expected_loss = jax.jit(make_step(Host(), ""))([np.asarray(p) for p in state], batch)
    host.fail_in(1)
    with pytest.raises(StepError, match="its results are in this error's `results`") as caught:
        train(state, batch)
    state, loss = caught.value.results
    assert not caught.value.state_lost and caught.value.__cause__.args == ("call 2 is one too many",)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for a, b in zip(state, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    check_next_call(make_step(Host(), ""), train, state, batch)


@pytest.mark.parametrize("devices", [1, 4])
def test_a_callback_raises_on_one_mesh(devices):
    host = Host()
    step = make_step(host, "forward")
    train = parallel(step, devices, autopar.DataParallel())
    params, batch = arguments()
    state, _ = train(params, batch)
    host.fail_in(1)
    with pytest.raises(StepError, match="overwritten: go on from a checkpoint") as caught:
        train(state, batch)
    assert caught.value.state_lost and caught.value.stage is None
    assert "pure_callback at test_failures.py" in caught.value.source
    check_next_call(step, train, params, batch)


def test_a_callback_returns_something_else():
    host = Host()
    train = parallel(make_step(host, "forward"), 8)
    params, batch = arguments()
    host.__class__ = type("Other", (Host,), {"__call__": lambda self, x: np.zeros(3, np.float32)})
    with pytest.raises(StepError, match=r"the callback returned float32\(3,\), not float32\(\)"):
        train(params, batch)


def test_a_callback_on_parameters_alone_is_called():
    host = Host()

    def step(params, batch):
        jax.debug.callback(host, params[1].sum())
        return make_step(host, "")(params, batch)

    train = parallel(step, 4)
    params, batch = arguments()
    for number in (1, 2):
        train(params, batch)
        jax.effects_barrier()
        assert host.calls == number


# What XLA raises


@contextlib.contextmanager
def debug_nans():
    jax.config.update("jax_debug_nans", True)
    try:
        yield
    finally:
        jax.config.update("jax_debug_nans", False)


@pytest.mark.parametrize("devices", [4, 8])
def test_debug_nans(devices):
    step = make_step(Host(), "nan")
    train = parallel(step, devices)
    params, batch = arguments()
    state, _ = train(params, batch)
    bad = arguments()[1]
    bad["shift"][2:4] = -2.0  # microbatch 1
    with debug_nans():
        with pytest.raises(StepError, match="nan") as caught:
            train(state, bad)
        assert isinstance(caught.value.__cause__, FloatingPointError)
        assert (caught.value.stage, caught.value.task, caught.value.microbatch) == (2, "forward", 1)
        assert re.fullmatch(r"`sqrt at test_failures.py:\d+ \(loss_fn\)`", caught.value.source)
        assert not caught.value.state_lost
        check_next_call(step, train, state, batch)


def test_debug_nans_on_one_mesh():
    train = parallel(make_step(Host(), "nan"), 4, autopar.ShardParallel((4,)))
    params, batch = arguments(shift=-2.0)
    with debug_nans(), pytest.raises(StepError, match="nan") as caught:
        train(params, batch)
    assert isinstance(caught.value.__cause__, FloatingPointError) and "test_failures.py" in caught.value.source


@pytest.mark.parametrize("kind, lost", [("F", False), ("U", True)])
def test_no_memory_is_left(kind, lost):
    """A program that cannot be started; in the update other stages have overwritten their state by then."""
    step = make_step(Host(), "")
    train = parallel(step, 4)
    params, batch = arguments()
    state, _ = train(params, batch)
    pipeline = train.latest().executable
    runs = [k for k, (_, i) in enumerate(pipeline._order) if getattr(i, "program", "").endswith("/" + kind)]

    def fail(step, held):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes.")

    whole = list(pipeline._acts)
    pipeline._acts[runs[-1]] = fail
    with pytest.raises(StepError, match="memory_budget_bytes") as caught:
        train(state, batch)
    assert caught.value.state_lost == lost and caught.value.__cause__.args[0].startswith("RESOURCE")
    pipeline._acts = whole
    check_next_call(step, train, params if lost else state, batch)


# Arguments that a compiled step cannot take


@pytest.mark.parametrize("method", [None, autopar.ShardParallel((4,))])
def test_donated_state_is_passed_again(method):
    step = make_step(Host(), "")
    train = parallel(step, 4, method)
    params, batch = arguments()
    state, _ = train(params, batch)
    newer, _ = train(state, batch)
    with pytest.raises(DonatedError, match="pass what the last call returned") as caught:
        train(state, batch)
    assert caught.value.paths[0] == "params/0"
    check_next_call(step, train, newer, batch)


@pytest.mark.parametrize("method", [None, autopar.ShardParallel((4,))])
def test_what_was_donated_is_read(method):
    """By a function that was compiled for such arrays before: where the step only donates, jaxlib 0.10 ends the process."""
    train = parallel(make_step(Host(), ""), 4, method)
    params, batch = arguments()
    state, _ = train(params, batch)
    for _ in range(2):
        assert all(np.isfinite(jnp.sum(array)) for array in state)
    train(state, batch)
    for array in state:
        with pytest.raises(RuntimeError, match="deleted"):
            jnp.sum(array)


@pytest.mark.parametrize("method", [None, autopar.ShardParallel((4,))])
def test_other_shapes_and_dtypes(method):
    params, batch = arguments()
    compiled = parallel(make_step(Host(), ""), 4, method).compile(params, batch)
    for wrong, line in (
        ({**batch, "x": batch["x"][:4]}, "batch/x is float32[4,16]"),
        ({**batch, "x": batch["x"].astype(np.int32)}, "batch/x is int32[8,16]"),
    ):
        with pytest.raises(StructureChangedError, match=re.escape(line)):
            compiled(params, wrong)


def test_a_donated_stack_is_passed_again():
    def step(params, batch):
        def loss_fn(params):
            x, _ = jax.lax.scan(lambda x, k: (jnp.tanh(x @ k), None), batch["x"], params)
            return jnp.mean((x - batch["y"]) ** 2)

        return params - 0.1 * jax.grad(loss_fn)(params)

    params, batch = arguments()
    train = parallel(step, 4)
    state = train(np.stack(params), batch)
    train(state, batch)
    with pytest.raises(DonatedError, match="params"):
        train(state, batch)


def test_measuring_tells_the_same():
    host = Host()
    train = parallel(make_step(host, "backward"), 4)
    params, batch = arguments()
    compiled = train.compile(params, batch)
    host.fail_in(1)
    with pytest.raises(StepError, match="stage 3, backward of microbatch 0"):
        compiled.measure(params, batch)
