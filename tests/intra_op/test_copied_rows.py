"""Rows of stacks that programs for CPUs copy: which, how many bytes, and that they take time there alone."""

import dataclasses

import pytest

from autopar.intra_op.copied_rows import row_bytes
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
    assert row_bytes(forward, mesh) == 2 * WEIGHT + 2 * SAMPLES
    # The weight and what was multiplied by it; the gradient, whose stack begins as zeros. `tanh` reads its row where it is.
    assert row_bytes(backward, mesh) == 2 * WEIGHT + 2 * SAMPLES + 3 * WEIGHT


def test_it_takes_time_on_cpus_alone(loops):
    both, mesh, body = loops
    other = device(0.0)
    cpu = dataclasses.replace(other, achieved=dataclasses.replace(other.achieved, host_cores=2, update_passes=1.5))
    seconds = [run_lanes(body, lambda _: 1e-6, mesh, each).compute_seconds for each in (other, cpu)]
    copied = LAYERS * sum(row_bytes(loop, mesh) for loop in both)
    assert seconds[1] - seconds[0] == pytest.approx(1.5 * copied / cpu.memory_bytes_per_second)
