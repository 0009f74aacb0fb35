"""`autopar.fit` on workers: one is killed, the run goes on from the newest checkpoint, and nothing in it differs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import autopar
from autopar import checkpoint
from autopar.errors import WorkerError
from tests.models.registry import CASES
from tests.patience import PATIENCE_SECONDS, wait_until
from tests.sweep import _host

pytestmark = pytest.mark.ray
NUM_STEPS = 5


def make_step(case, cluster):
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=3)
    return autopar.parallelize(case.step, cluster=cluster, method=method, batch_argnums=(1,))


def kill_one(step):
    """End a worker's process, as the kernel would for want of memory."""
    import ray

    actor = list(step.latest().executable.workers._actors.values())[-1]
    os.kill(ray.get(actor.pid.remote()), signal.SIGKILL)


@pytest.fixture(scope="module")
def case():
    return CASES["mlp_schedule_clip"]()


@pytest.fixture(scope="module")
def batches(case):
    return [case.batches[k % len(case.batches)] for k in range(NUM_STEPS)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Where the run on workers that live saves its state."""
    return tmp_path_factory.mktemp("undisturbed")


@pytest.fixture(scope="module")
def undisturbed(one_host, case, batches, directory):
    """State and metrics of a run on workers that live."""
    found = autopar.fit(make_step(case, one_host), case.state, batches, checkpoint_dir=directory, save_every=2)
    return jax.tree.map(_host, found)


@pytest.mark.parametrize("at", [1, 3])
def test_a_killed_worker_changes_nothing(case, batches, undisturbed, one_host, tmp_path, at):
    step, killed = make_step(case, one_host), []

    def on_step(number, metrics):
        if number == at and not killed:
            killed.append(number)
            kill_one(step)

    state, metrics = autopar.fit(
        step, case.state, batches, checkpoint_dir=tmp_path, save_every=2, on_step=on_step, cluster=lambda: one_host
    )
    state = jax.tree.map(_host, state)
    assert killed == [at] and sorted(metrics) == list(range(NUM_STEPS))
    jax.tree.map(np.testing.assert_array_equal, (state, metrics), undisturbed)


def test_the_user_may_want_to_know(case, batches, one_host, tmp_path):
    step = make_step(case, one_host)

    def on_step(number, metrics):
        if number == 2:
            wait_until(
                lambda: checkpoint.latest(tmp_path) == 2, "a checkpoint, which the workers write beside this step"
            )
            kill_one(step)

    with pytest.raises(WorkerError):
        autopar.fit(
            step,
            case.state,
            batches,
            checkpoint_dir=tmp_path,
            save_every=2,
            on_failure="raise",
            on_step=on_step,
        )
    assert checkpoint.latest(tmp_path) == 2, "what was saved is there"


def test_any_plan_reads_what_workers_hold(case, undisturbed, directory):
    """Saved from workers, restored in this process."""
    restored = checkpoint.restore(directory, case.state)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(_host, restored), undisturbed[0])


LOST = """
import os, sys, time, warnings
sys.path.insert(0, {root!r})
import numpy as np
import jax
import ray
import autopar
from tests.models.registry import CASES
from tests.ray.cluster import make_cluster, start_two_nodes
from tests.ray.test_resume import make_step
nodes, second = start_two_nodes()
case = CASES["mlp_schedule_clip"]()
batches = [case.batches[k % len(case.batches)] for k in range(5)]
found = []

def cluster():
    found.append(autopar.Cluster.ray().hosts)
    return make_cluster(found[-1], 4 // found[-1])

def on_step(number, metrics):
    if number == 2 and not found:
        pids = ray.get([actor.pid.remote() for actor in train.latest().executable.workers._actors.values()])
        nodes.remove_node(second, allow_graceful=False)
        while all(os.path.exists("/proc/" + str(pid)) for pid in pids):  # else the steps that are left may all be done
            time.sleep(0.1)

train = make_step(case, make_cluster(2, 2))
options = dict(save_every=2, on_step=on_step, cluster=cluster, max_failures=9)
state, metrics = autopar.fit(train, case.state, batches, checkpoint_dir={folder!r}, **options)
print("nodes found:", found, "steps:", sorted(metrics))
want = case.state
for batch in batches:
    want, _ = jax.jit(case.step)(want, batch)
for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(want), strict=True):
    if not isinstance(b, jax.Array) or not jax.dtypes.issubdtype(b.dtype, jax.dtypes.prng_key):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)
ray.shutdown()
nodes.shutdown()
"""


@pytest.mark.slow
def test_a_lost_node_is_survived(tmp_path):
    """Ray takes a while to see it: clusters that still have the node fail to start, and are tried again without it."""
    pytest.importorskip("ray")
    script = LOST.format(root=str(Path(__file__).parents[2]), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    assert "1] steps: [0, 1, 2, 3, 4]" in done.stdout
