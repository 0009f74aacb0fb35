"""Rows of stacks that programs for CPUs and GPUs copy: which, how many bytes, and that they take time there alone."""

import dataclasses

import pytest

from autopar.intra_op.copied_rows import copying_seconds, row_bytes
from autopar.intra_op.lanes import run_lanes
from autopar.intra_op.sharded import Region
from tests.intra_op.test_lanes import device, plan_of

LAYERS, WIDTH, BATCH = 8, 64, 32
WEIGHT, SAMPLES = 4 * WIDTH * WIDTH, 4 * BATCH // 4 * WIDTH  # bytes of a row on each of four devices


@pytest.fixture(scope="module")
def loops():
    """The loops of `tanh(x @ w)` over stacked weights, forwards and backwards; and their mesh."""
    plan = plan_of(True, 0, 1e10, 0.0, LAYERS, WIDTH, BATCH)
    (stage,) = plan.attached.pipeline.stages
    (task,) = stage.tasks
    return [i for i in task.body.instructions if isinstance(i, Region)], plan.mesh, task.body


def test_what_products_read_and_make_is_copied(loops):
    (forward, backward), mesh, _ = loops
    # The weight is read and written; both stacks of activations, written by elementwise work or handed on, begin as zeros.
    assert row_bytes(forward, mesh, True) == 2 * WEIGHT + 2 * SAMPLES
    # The weight and what was multiplied by it; the gradient, whose stack begins as zeros. `tanh` reads its row where it is.
    assert row_bytes(backward, mesh, True) == 2 * WEIGHT + 2 * SAMPLES + 3 * WEIGHT


def test_gpus_read_rows_in_place_and_copy_all_that_they_make(loops):
    (forward, backward), mesh, _ = loops
    assert row_bytes(forward, mesh, False) == 3 * 2 * SAMPLES  # zeros; and a row is read and written
    assert row_bytes(backward, mesh, False) == 3 * WEIGHT


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_it_takes_time_on_cpus_and_gpus_alone(loops, kind):
    both, mesh, body = loops
    other = device(0.0)
    own = {"host_cores": 2} if kind == "cpu" else {"cores": 100}
    copying = dataclasses.replace(other, achieved=dataclasses.replace(other.achieved, update_passes=1.5, **own))
    seconds = [run_lanes(body, lambda _: 1e-6, mesh, each).compute_seconds for each in (other, copying)]
    copied = LAYERS * sum(row_bytes(loop, mesh, kind == "cpu") for loop in both)
    assert seconds[1] - seconds[0] == pytest.approx(1.5 * copied / copying.memory_bytes_per_second)
    assert copying_seconds(body, mesh, copying) == pytest.approx(seconds[1] - seconds[0])


def test_what_no_problem_prices_opens_no_gap():
    plan = plan_of(True, 0, 1e10, 0.0, LAYERS, WIDTH, BATCH)
    (stage,) = plan.attached.pipeline.stages
    sharded = stage.sharded
    much = 3 * sharded.step_seconds
    copying = dataclasses.replace(sharded, compute_seconds=sharded.compute_seconds + much, copying_seconds=much)
    assert copying.step_seconds == pytest.approx(4 * sharded.step_seconds)
    assert copying.gap == pytest.approx(sharded.gap) and copying.is_off_price == sharded.is_off_price
    (task,) = stage.tasks
    slower = dataclasses.replace(task, seconds=task.seconds + much, copying_seconds=much)
    assert dataclasses.replace(stage, tasks=(slower,)).gap == pytest.approx(stage.gap)
