"""A worker that dies, hangs or raises ends the step in one error; nothing is left, and the next step works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import autopar
from autopar.errors import DeletedError, WorkerError
from autopar.plan.instructions import Recv, Run
from tests.models.registry import CASES
from tests.ray.cluster import make_cluster
from tests.ray.conftest import children, wait_until_gone
from tests.sweep import _host

pytestmark = pytest.mark.ray

WITHIN_SECONDS = 15.0
SEEDS = 6


@pytest.fixture(scope="module")
def job(ray_started):
    """A pipeline on workers of its own, compiled anew after each fault; its first step's result."""
    cluster = make_cluster(1, 4, wait_seconds=8.0, silence_seconds=5.0)
    case = CASES["mlp_schedule_clip"]()
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=3)
    step = autopar.parallelize(case.step, cluster=cluster, method=method, batch_argnums=(1,))
    yield case, step, jax.tree.map(_host, step(case.state, case.batches[0]))
    cluster.machine.close()


def actors(step):
    import ray

    workers = step.latest().executable.workers
    pids = ray.get([actor.pid.remote() for actor in workers._actors.values()])
    return list(workers._actors.values()), pids


def at_instruction(step, worker, number, act):
    """From now on `act` is what the worker does at this instruction, in its process."""
    import ray

    def patch(self, number=number, act=act):
        loaded = self.loaded[max(self.loaded)]
        before = loaded.acts[number]

        def instead(step, held):
            act()
            before(step, held)

        loaded.acts[number] = instead

    ray.get(actors(step)[0][worker].__ray_call__.remote(patch))


def fails(step, case, state=None):
    """The error of a step, and that it came in time."""
    started = time.monotonic()
    with pytest.raises(WorkerError) as info:
        step(case.state if state is None else state, case.batches[0])
    assert time.monotonic() - started < WITHIN_SECONDS
    return info.value


def check_recovers(step, case, first, pids):
    """Nothing is left of the workers, and the same step works again, with new ones."""
    assert not wait_until_gone(set(pids)), "workers are left"
    import ray

    groups = ray.util.placement_group_table().values()
    assert all(group["state"] == "REMOVED" for group in groups if len(group["bundles"]) == 2), "a placement group is left"
    again = jax.tree.map(_host, step(case.state, case.batches[0]))
    jax.tree.map(np.testing.assert_array_equal, again, first)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_killed_at_any_instruction(job, seed):
    case, step, first = job
    streams = step.latest().plan.streams
    random = np.random.default_rng(seed)
    worker = int(random.integers(len(streams)))
    number = int(random.integers(len(streams[worker])))
    pids = actors(step)[1]
    at_instruction(step, worker, number, lambda: os.kill(os.getpid(), signal.SIGKILL))
    error = fails(step, case)
    assert f"worker {worker} " in error.worker and "process has ended" in str(error)
    check_recovers(step, case, first, pids)


def test_stopped(job):
    """It is not dead, so that only its silence tells; its peer says for which instruction it waits."""
    case, step, first = job
    pids = actors(step)[1]
    at_instruction(step, 0, 0, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    error = fails(step, case)
    assert "worker 0 " in error.worker and "does not answer" in str(error)
    assert error.instruction.startswith("send") and error.microbatch == 0
    assert "worker 1 (mesh 1, host 0) waits: receive" in str(error) and "<- mesh 0, microbatch 0" in str(error)
    check_recovers(step, case, first, pids)


def test_stuck(job):
    """It answers, but does not come on: the one that waits for it says so."""
    case, step, first = job
    pids = actors(step)[1]
    stream = step.latest().plan.streams[1]
    at_instruction(step, 0, 0, lambda: time.sleep(60))
    error = fails(step, case)
    assert "worker 1 " in error.worker and "waited 8 s for a message of worker 0" in str(error)
    assert error.waited_for == 0 and error.microbatch == 0
    assert error.instruction == str(next(i for i in stream if isinstance(i, Recv)))
    check_recovers(step, case, first, pids)


def test_exception_in_a_stage(job):
    case, step, first = job
    pids = actors(step)[1]
    stream = step.latest().plan.streams[1]
    number = [k for k, i in enumerate(stream) if isinstance(i, Run) and i.microbatch == 2][0]

    def act():
        raise ArithmeticError("no such number")

    at_instruction(step, 1, number, act)
    error = fails(step, case)
    assert "ArithmeticError: no such number" in str(error)
    assert error.instruction == str(stream[number]) and error.stage == 1 and error.microbatch == 2
    check_recovers(step, case, first, pids)


def test_state_of_ended_workers(job):
    """What lay there is gone, and says so."""
    case, step, first = job
    state, _ = step(case.state, case.batches[0])
    pids = actors(step)[1]
    os.kill(pids[0], signal.SIGKILL)
    fails(step, case, state)
    with pytest.raises((WorkerError, DeletedError)):
        step(state, case.batches[0])
    with pytest.raises((WorkerError, DeletedError)):
        np.asarray(jax.tree.leaves(state)[0])
    check_recovers(step, case, first, pids)


DRIVER = """
import sys, time
sys.path.insert(0, {root!r})
import autopar
from tests.models.registry import CASES
from tests.ray.cluster import make_cluster, start_ray
start_ray()
case = CASES["mlp_schedule_clip"]()
method = autopar.PipelineParallel(num_stages=2, num_microbatches=3)
step = autopar.parallelize(case.step, cluster=make_cluster(1, 4), method=method, batch_argnums=(1,))
state, _ = step(case.state, case.batches[0])
print("running", flush=True)
while True:
    state, _ = step(state, case.batches[0])
"""


def test_killed_driver_leaves_nothing():
    root = str(Path(__file__).parents[2])
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER.format(root=root)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert driver.stdout.readline().strip() == "running"
    time.sleep(0.5)
    started = children(driver.pid)
    assert len(started) > 4, "Ray and the workers are its children"
    driver.kill()
    driver.wait()
    assert not wait_until_gone(started), "processes are left"
