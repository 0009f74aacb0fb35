"""What workers tell beside results: what callbacks did and raised, and when programs ran."""

from __future__ import annotations

import glob
import json
import os
import re
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import NotBuiltYetError, PipelineError, StepError
from autopar.inter_op.stage import Task
from autopar.runtime.ray.driver.clocks import clock_offset
from autopar.runtime.ray.driver.driver import callback_error
from autopar.runtime.ray.functions import portable
from autopar.streams.instructions import Run, Send
from tests.patience import wait_until
from tests.small_mlp import make_batch, make_params, train_step

pytestmark = pytest.mark.ray

MICROBATCHES, LIMIT = 4, 100.0


class OverLimitError(Exception):
    def __init__(self, value):
        super().__init__(f"{value:.0f} is over the limit")


def limited(x):
    """The callback: what it is given, unless that is too large."""
    if np.max(x) > LIMIT:
        raise ValueError(f"{np.max(x):.0f} is over the limit")
    return np.asarray(x)


def make_step(where, log=None):
    """Three layers; behind the second, or in its gradient, or in the update, the host is called."""

    def noting(x):
        if log is not None:
            with open(log, "a") as file:
                file.write(f"{os.getpid()}\n")
        return limited(x)

    @jax.custom_vjp
    def backward_calls(x, mark):
        return x

    def called(x, mark):
        """x, by way of the host, which is shown the sum of the microbatch's marks."""
        marks = jnp.sum(jax.lax.stop_gradient(x) * 0 + mark) / x.shape[1]
        return x * jnp.minimum(jax.pure_callback(noting, jax.ShapeDtypeStruct((), x.dtype), marks), 1)

    backward_calls.defvjp(lambda x, mark: (x, mark), lambda mark, g: (called(g, mark), None))

    opaque = autopar.sharding_rule("b d -> b d")(lambda x: jax.pure_callback(limited, x, x))
    linear = jax.custom_vjp(opaque)
    linear.defvjp(lambda x: (opaque(x), None), lambda _, g: (g,))

    def step(params, batch):
        def loss_fn(params):
            x = batch["x"]
            for number, kernel in enumerate(params):
                x = jnp.tanh(x @ kernel)
                if number == 1 and where == "forward":
                    x = called(x, batch["mark"])
                if number == 1 and where == "opaque":
                    x = linear(x)
                if number == 1 and where == "backward":
                    x = backward_calls(x, batch["mark"])
            return jnp.mean((x - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        if where == "update":
            jax.debug.callback(noting, jnp.sum(batch["mark"]))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step


def arguments(bad_microbatch=None):
    batch = make_batch(8, 16) | {"mark": np.ones((8, 1), np.float32)}
    if bad_microbatch is not None:
        batch["mark"][2 * bad_microbatch] = 2 * LIMIT
    return make_params(3, 16), batch


def parallel(cluster, step, method=None, **options):
    method = method or autopar.PipelineParallel(
        num_stages=2, num_microbatches=MICROBATCHES, microbatch_semantics="per_microbatch"
    )
    return autopar.parallelize(step, cluster=cluster, method=method, batch_argnums=(1,), **options)


def check_next_call(step, train, state, batch):
    """The step with the state as it was equals plain `jax.jit`."""
    expected = jax.jit(step)([np.asarray(p) for p in state], batch)
    got = train(state, batch)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_callback_raises(clusters, where, tmp_path):
    """On the worker; the state is there as it was, and the workers go on."""
    step = make_step(where, str(tmp_path / "log"))
    train = parallel(clusters[1, 4], step)
    params, batch = arguments()
    state, _ = train(params, batch)
    pids = (tmp_path / "log").read_text().split()
    workers = train.latest().executable.workers
    there = workers.call("pid", {seat.number: () for seat in workers.seats}).values()
    assert len(pids) == MICROBATCHES and len(set(pids)) == 1 and int(pids[0]) in there
    with pytest.raises(StepError, match=r"ValueError: \d+ is over the limit") as caught:
        train(state, arguments(bad_microbatch=2)[1])
    error = caught.value
    assert isinstance(error.__cause__, ValueError) and not error.state_lost and error.results is None
    assert (error.stage, error.task, error.microbatch) == (1, where, 2)
    assert re.search(r"`pure_callback at test_reports.py:\d+ \((called|loss_fn)\)", error.source)
    assert not any(p.is_deleted() for p in state) and not workers.closed
    check_next_call(step, train, state, batch)


@pytest.mark.parametrize("method", [None, pytest.param(autopar.ShardParallel(), marks=pytest.mark.slow)])
def test_a_callback_without_results_raises_when_all_is_done(clusters, method):
    step = make_step("update")
    train = parallel(clusters[1, 4], step, method)
    params, batch = arguments()
    state, _ = train(params, batch)
    expected, expected_loss = jax.jit(make_step(""))([np.asarray(p) for p in state], batch)
    with pytest.raises(StepError, match="its results are in this error's `results`") as caught:
        train(state, arguments(bad_microbatch=0)[1])
    assert not caught.value.state_lost and "debug_callback at test_reports.py" in caught.value.source
    state, loss = caught.value.results
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for a, b in zip(state, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=2e-5, atol=1e-6)
    check_next_call(make_step(""), train, state, batch)


@pytest.mark.parametrize("donated", [(0,), pytest.param((), marks=pytest.mark.slow)])
def test_a_callback_raises_on_one_mesh(clusters, donated):
    """The one program has overwritten its arguments by then, unless it may not."""
    step = make_step("forward")
    train = parallel(clusters[1, 4], step, autopar.ShardParallel(), donate_argnums=donated)
    params, batch = arguments()
    state, _ = train(params, batch)
    with pytest.raises(StepError, match="over the limit") as caught:
        train(state, arguments(bad_microbatch=0)[1])
    assert caught.value.state_lost == bool(donated) and caught.value.stage is None
    check_next_call(step, train, params if donated else state, batch)


def test_what_is_printed(clusters):
    """A print is in its worker's output, which Ray shows at the driver."""
    import ray

    def step(params, batch):
        jax.debug.print("the marks are {marks}", marks=batch["mark"].sum())
        return train_step(params, {"x": batch["x"], "y": batch["y"]})

    params, batch = arguments()
    parallel(clusters[1, 4], step)(params, batch)
    logs = os.path.join(ray._private.worker._global_node.get_logs_dir_path(), "worker-*.out")
    wait_until(lambda: any("the marks are 8.0" in open(path).read() for path in glob.glob(logs)), "what is printed")


# What cannot be sent


def refused(clusters, step, words):
    params, batch = arguments()
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=1)
    with pytest.raises(NotBuiltYetError, match=words):
        parallel(clusters[1, 4], step, method)(params, batch)


def test_refused(clusters):
    lock = threading.Lock()

    def locked(x):
        with lock:
            pass

    def with_call(call):
        def step(params, batch):
            call(batch["mark"].sum())
            return train_step(params, {"x": batch["x"], "y": batch["y"]})

        return step

    refused(
        clusters, with_call(lambda x: jax.debug.callback(locked, x)), r"test_reports.py(.*\n)*.*cannot pickle.*lock"
    )
    refused(clusters, with_call(lambda x: jax.debug.print("{x}", x=x, ordered=True)), "ordered=True")


def test_refused_where_it_has_no_place(clusters):
    refused(clusters, make_step("opaque"), "`pure_callback` inside a function with a sharding rule")

    def init(params):
        jax.debug.print("born")
        return params

    params, batch = arguments()
    with pytest.raises(NotBuiltYetError, match="debug_print"):
        parallel(clusters[1, 4], make_step("")).create_state(init, params, example=(batch,))


# Without workers


def test_exceptions_travel():
    kept = portable(OverLimitError.__base__("x"))
    assert type(kept) is Exception
    told = portable(OverLimitError(3.0))  # cannot be made anew of its one text
    assert type(told) is RuntimeError and str(told) == "OverLimitError: 3 is over the limit"


def test_the_first_of_several_is_told():
    from autopar.partition.host_calls import Raised

    def raised(program, microbatch):
        return Raised(program, microbatch, f"{program}{microbatch}", False, ValueError(program))

    tasks = [
        Task("F", "0/F", 0, 0, None, (), ()),
        Task("F", "1/F", 1, 0, None, (), ()),
        Task("B", "0/B", 0, 0, None, (), ()),
    ]
    runs = {0: (Run("0/F", 0, 0), Run("0/F", 0, 1), Run("0/B", 0, 0)), 1: (Run("1/F", 1, 0),)}
    streams = SimpleNamespace(instructions=runs, programs={task.name: SimpleNamespace(task=task) for task in tasks})
    error = callback_error("step", streams, [raised("0/B", 0), raised("0/F", 1), raised("1/F", 0)], False)
    assert (error.stage, error.task, error.microbatch, error.source) == (1, "forward", 0, "`1/F0`")


# Times


def test_measured_timeline(clusters):
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=MICROBATCHES)
    train = autopar.parallelize(train_step, cluster=clusters[1, 4], method=method)
    params, batch = make_params(4, 16), make_batch(8, 16)
    compiled = train.compile(params, batch)
    (state, loss), timeline = compiled.measure(params, batch)
    expected, expected_loss = jax.jit(train_step)(params, batch)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(state[0]), expected[0], rtol=1e-5, atol=1e-6)
    planned = compiled.plan.timeline()
    assert isinstance(timeline, type(planned)) and "by the clocks of the hosts" in timeline.note
    key = lambda e: (e.name, e.kind, e.stage, e.microbatch, e.mesh)  # noqa: E731
    assert sorted(map(key, timeline.events)) == sorted(map(key, planned.events))
    assert all(e.end > e.start >= 0 for e in timeline.events) and 0 < timeline.seconds < 60
    check_order(compiled.plan.streams, timeline)
    events = [e for e in json.loads(timeline.json())["traceEvents"] if e["ph"] == "X"]
    assert len(events) == len(timeline.events)
    assert all({"kind", "stage", "microbatch", "mesh"} == set(e["args"]) for e in events)
    compiled(state, batch)


def check_order(streams, timeline):
    """On each mesh programs ran one after the other, as its stream says; a message came after it was sent."""
    spans = {(e.name, e.microbatch): e for e in timeline.events if e.kind != "transfer"}
    for stream in streams.values():
        runs = [spans[i.program, i.microbatch] for i in stream if isinstance(i, Run)]
        assert all(a.end <= b.start for a, b in zip(runs, runs[1:], strict=False))
        for at, instruction in enumerate(stream):
            if isinstance(instruction, Send):
                before = [spans[i.program, i.microbatch] for i in stream[:at] if isinstance(i, Run)]
                sends = [e for e in timeline.events if e.name == f"to mesh {instruction.peer}"]
                assert any(e.start >= before[-1].end for e in sends)


def test_measuring_tells_what_a_callback_raised(clusters):
    train = parallel(clusters[1, 4], make_step("forward"))
    params, batch = arguments()
    compiled = train.compile(params, batch)
    with pytest.raises(StepError, match="forward of microbatch 1"):
        compiled.measure(params, arguments(bad_microbatch=1)[1])
    assert compiled.measure(params, batch)[1].events


def test_one_program_has_no_timeline(clusters):
    params, batch = arguments()
    compiled = parallel(clusters[1, 4], make_step(""), autopar.ShardParallel()).compile(params, batch)
    with pytest.raises(PipelineError, match="no timeline"):
        compiled.measure(params, batch)


def test_clocks_are_aligned():
    """The quickest answer counts: it bounds how far off the offset can be."""
    ways = iter([(0.3, 0.1), (0.02, 0.01), (0.1, 0.3), (0.2, 0.2), (0.5, 0.5)])
    here = [100.0]

    def ask():
        there, back = next(ways)
        here[0] += there
        shown = here[0] + 7.0
        here[0] += back
        return shown

    ahead, error = clock_offset(ask, lambda: here[0])
    assert error == pytest.approx(0.015) and abs(ahead - 7.0) <= error
