"""Schedules: clocks and residuals against the formulas, the tables in their docstrings, and schedules of one's own."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import AutoparError, PipelineError
from autopar.streams.schedules import (
    SCHEDULES,
    GPipe,
    Inference,
    Interleaved,
    OneFOneB,
    Step,
    ZeroBubbleH1,
    find_schedule,
    in_flight,
)
from autopar.streams.schedules.schedule import clocks
from tests.sweep import QUICK, SLOW, _host, relative_error

SIZES = [(m, s) for m in (1, 2, 3, 4, 5, 8, 16) for s in (1, 2, 3, 4, 6, 8)]
"""Numbers of microbatches and of stages."""


def twice_as_long_backwards(stage, step):
    return 2 if step.kind == "B" else 1


def timetable(order, *length):
    """An order as text, a row per stage and a column per clock."""
    total, starts = clocks(order, *length)
    width = 1 + max((len(str(step)) for steps in order for step in steps), default=1)
    lines = []
    for stage, row in enumerate(starts):
        cells = [""] * int(total)
        for start, step in row:
            cells[int(start)] = str(step)
        lines.append(f"stage {stage}  " + "".join((cell or ".").ljust(width) for cell in cells).rstrip())
    return "\n".join(lines)


def ids_of(sizes):
    return [f"m{m}s{s}" for m, s in sizes]


@pytest.mark.parametrize("m, s", SIZES, ids=ids_of(SIZES))
@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB()], ids=lambda schedule: schedule.name)
def test_forward_and_backward(schedule, m, s):
    order = schedule.order(s, m)
    total, starts = clocks(order)
    assert total == 2 * (m + s - 1)
    assert clocks(order, twice_as_long_backwards)[0] == 3 * (m + s - 1)
    wanted = Counter(Step(kind, k) for kind in "FB" for k in range(m))
    assert len(order) == len(starts) == s and all(Counter(steps) == wanted for steps in order)
    assert [[step for _, step in row] for row in starts] == order
    assert in_flight(order) == [m if schedule.name == "gpipe" else min(m, s - stage) for stage in range(s)]


@pytest.mark.parametrize("m, s", SIZES, ids=ids_of(SIZES))
def test_inference(m, s):
    order = Inference().order(s, m)
    assert clocks(order)[0] == m + s - 1
    assert all(Counter(steps) == Counter(Step("F", k) for k in range(m)) for steps in order)


@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB(), ZeroBubbleH1(), Inference()])
def test_the_table_in_the_docstring(schedule):
    lines = type(schedule).__doc__.splitlines()
    table = [line.strip().split("  " * 4)[0] for line in lines if line.strip().startswith("stage ")]
    assert "\n".join(table) == timetable(schedule.order(num_stages=2, num_microbatches=4))


@pytest.mark.parametrize("m, s", SIZES, ids=ids_of(SIZES))
def test_zero_bubble(m, s):
    order = ZeroBubbleH1().order(s, m)
    wanted = Counter(Step(kind, k) for kind in "FBW" for k in range(m))
    assert all(Counter(steps) == wanted for steps in order)
    total = clocks(order)[0]
    assert total == 3 * m + s - 1 or (m < s and total <= 3 * (m + s - 1))
    assert max(in_flight(order)) <= min(m, s), "no more in flight than 1F1B on its first stage"


UNEVEN = [(5, 2, 2), (5, 4, 3), (7, 5, 2), (3, 4, 2)]


@pytest.mark.parametrize("m, s, chunks", [(4, 2, 2), (8, 4, 2), (4, 4, 3), (12, 3, 3), (3, 1, 2), *UNEVEN])
def test_interleaved(m, s, chunks):
    order = Interleaved(chunks).order(s, m)
    wanted = Counter(Step(kind, k, chunk) for kind in "FB" for k in range(m) for chunk in range(chunks))
    assert all(Counter(steps) == wanted for steps in order)
    total = clocks(order)[0]
    assert total == 2 * (m * chunks + s - 1) or (m < s and total <= chunks * clocks(OneFOneB().order(s, m))[0])


def test_in_flight_of_chunks():
    """The table above `Interleaved`: of the first chunk more wait than of the second, which comes back sooner."""
    assert in_flight(Interleaved().order(2, 4)) == [4, 3, 2, 1]


def test_backward_twice_as_long_and_split():
    order = [[Step("F", 0), Step("B", 0), Step("W", 0)], [Step("F", 0), Step("B", 0), Step("W", 0)]]
    assert timetable(order) == "stage 0  F0 .  .  B0 W0\nstage 1  .  F0 B0 W0 ."
    assert timetable(order, twice_as_long_backwards) == "stage 0  F0 .  .  .  B0 .  W0\nstage 1  .  F0 B0 .  W0 .  ."


# Schedules of one's own.


class LastBackwardFirst:
    """GPipe as in the paper: the microbatch that came last goes back first."""

    name = "last backward first"

    def order(self, num_stages, num_microbatches):
        backward = [Step("B", k) for k in reversed(range(num_microbatches))]
        return [[*(Step("F", k) for k in range(num_microbatches)), *backward] for _ in range(num_stages)]


class Circle(LastBackwardFirst):
    """The last stage begins with the microbatch that the first forwards only after a backward of another."""

    name = "circle"

    def order(self, num_stages, num_microbatches):
        numbers = list(range(num_microbatches))
        one_by_one = [Step(kind, k) for k in numbers for kind in "FB"]
        return [one_by_one] * (num_stages - 1) + [[Step(kind, k) for k in numbers[::-1] for kind in "FB"]]


class Miscounted(LastBackwardFirst):
    """GPipe, of more or fewer microbatches than there are."""

    name = "miscounted"

    def __init__(self, more):
        self.more = more

    def order(self, num_stages, num_microbatches):
        return GPipe().order(num_stages, num_microbatches + self.more)


class Again(LastBackwardFirst):
    """The first backward twice."""

    name = "again"

    def order(self, num_stages, num_microbatches):
        return [[*steps, Step("B", 0)] for steps in GPipe().order(num_stages, num_microbatches)]


class Hasty(LastBackwardFirst):
    """A backward before its forward."""

    name = "hasty"

    def order(self, num_stages, num_microbatches):
        return [[Step(kind, k) for kind in "BF" for k in range(num_microbatches)] for _ in range(num_stages)]


def train_step(params, batch):
    def loss_fn(params):
        hidden = jnp.tanh(batch["x"] @ params[0])
        return jnp.mean((jnp.tanh(hidden @ params[1]) @ params[2] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def arguments():
    random = np.random.default_rng(0)
    params = [random.normal(size=shape).astype(np.float32) / 4 for shape in ((12, 16), (16, 16), (16, 4))]
    return params, {"x": random.normal(size=(8, 12)).astype(np.float32), "y": np.ones((8, 4), np.float32)}


def make_step(schedule, num_stages=2):
    return autopar.parallelize(
        train_step,
        cluster=autopar.Cluster.local(jax.devices()[:num_stages], device=SLOW, intra=QUICK),
        method=autopar.PipelineParallel(num_stages=num_stages, num_microbatches=4, schedule=schedule),
        batch_argnums=(1,),
    )


def test_own_schedule():
    step, args = make_step(LastBackwardFirst()), arguments()
    expected = jax.jit(train_step)(*args)
    plan = step.plan(*args)
    assert plan.schedule == "last backward first"
    for mesh in (0, 1):
        backward = [e.microbatch for e in plan.timeline().events if (e.mesh, e.kind) == (mesh, "B")]
        assert backward == [3, 2, 1, 0]
    for got, want in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(expected), strict=True):
        assert relative_error(_host(got), _host(want)) < 1e-6


def test_own_schedule_comes_back_from_a_file(tmp_path):
    args = arguments()
    plan = make_step(LastBackwardFirst()).plan(*args)
    plan.save(tmp_path / "plan")
    attached = make_step(LastBackwardFirst()).attach(*args, plan=autopar.Plan.load(tmp_path / "plan"))
    assert attached == plan and attached.streams == plan.streams


def test_stages_that_wait_in_a_circle():
    with pytest.raises(ValueError, match="cannot go on: .* 0: B0; .* 1: F3"):
        clocks(Circle().order(2, 4))
    with pytest.raises(PipelineError, match="(?s)does not carry out the step.*cannot go on"):
        make_step(Circle()).plan(*arguments())


def test_backward_before_its_forward():
    with pytest.raises(ValueError, match="cannot go on: .* 0: B0; .* 1: B0"):
        clocks(Hasty().order(2, 4))
    with pytest.raises(PipelineError, match="(?s)does not carry out the step.*cannot go on"):
        make_step(Hasty()).plan(*arguments())


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(Miscounted(-1), id="without the last"),
        pytest.param(Miscounted(1), id="one too many"),
        pytest.param(Again(), id="one twice"),
        pytest.param("inference", id="no backward"),
    ],
)
def test_every_microbatch_once(schedule):
    with pytest.raises(PipelineError, match="does not carry out the step"):
        make_step(schedule).plan(*arguments())


def test_unknown_name():
    for ask in (find_schedule, lambda name: autopar.PipelineParallel(num_stages=2, schedule=name)):
        with pytest.raises(
            AutoparError, match="there is no such `schedule`(.*\n)*.*'zigzag'(.*\n)*.*'gpipe', '1f1b', .*'inference'"
        ):
            ask("zigzag")
    with pytest.raises(AutoparError, match=r"did you mean '1f1b'\? .* or 'auto' in a method"):
        find_schedule("1F1B")
    with pytest.raises(AutoparError, match="there is no such `schedule`"):
        find_schedule("auto")  # a method's word for all of them, and none by itself
    assert find_schedule("1f1b") is SCHEDULES["1f1b"]
    mine = Circle()
    assert find_schedule(mine) is mine
