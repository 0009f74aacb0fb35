"""Checkpoints of state on workers: written by those who hold it while they step, whole or not at all, read by anyone."""

from __future__ import annotations

import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import autopar
from autopar import checkpoint
from autopar.errors import CheckpointError, DonatedError, WorkerError
from autopar.runtime.ray.driver.handles import RemoteArray
from autopar.runtime.ray.driver.workers import Workers
from tests.checkpoint_model import batches, create_state, step_on, there, train_step
from tests.patience import PATIENCE_SECONDS, several_times
from tests.ray.cluster import make_cluster
from tests.sweep import _host

pytestmark = pytest.mark.ray

TWO_STAGES = autopar.PipelineParallel(num_stages=2, num_microbatches=2)


def host(tree):
    return jax.tree.map(_host, tree)


def assert_same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        got, want = _host(got), _host(want)
        assert got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == want.tobytes()


@pytest.fixture
def fetched(monkeypatch):
    """Bytes of each array that has gone through this process."""
    found = []

    def fetch(self, mesh, key, kind, own=Workers.fetch):
        found.append(kind.num_bytes)
        return own(self, mesh, key, kind)

    monkeypatch.setattr(Workers, "fetch", fetch)
    return found


def in_workers(step, patch, workers=None):
    """Have a function called with each worker, or with some, in their processes."""
    import ray

    actors = step.latest().executable.workers._actors
    ray.get([actors[n].__ray_call__.remote(patch) for n in (actors if workers is None else workers)])


def before_writing(act):
    """From now on `act` is called with a worker's disk and the number of the save, in its thread, before it writes."""

    def patch(self, act=act):
        kind = type(self._disk)
        kind.own_write = own = vars(kind).get("own_write", kind.write)

        def write(disk, save, *arguments):
            act(disk, save)
            return own(disk, save, *arguments)

        kind.write = write

    return patch


def as_before():
    def patch(self):
        kind = type(self._disk)
        kind.write = vars(kind).get("own_write", kind.write)

    return patch


def no_copies_left():
    def check(self):
        assert not self._disk._tiles, "copies are left"

    return check


def on_workers(step, count=1):
    """A state on the workers, after some steps."""
    state = create_state()
    for batch in batches(count):
        state, _ = step(state, batch)
    return state


@pytest.fixture(scope="module")
def step(clusters):
    """Two stages of two processes each."""
    return autopar.parallelize(train_step, cluster=clusters[4, 2], method=TWO_STAGES)


def test_workers_write_what_they_hold(step, tmp_path, fetched):
    """Nothing of it goes through this process, and everyone reads it: orbax alone, another plan here, the workers."""
    state = on_workers(step, 2)
    wanted = host(state)
    fetched.clear()
    assert len(step.latest().executable.workers.seats) == 4
    assert any(len(leaf.parts) == 2 for leaf in jax.tree.leaves(state)), "layers are stacked over both stages"
    checkpoint.save(tmp_path, state, 2).wait()
    assert fetched == [], "bytes of state came here"
    writers = {p.name for p in (tmp_path / "2").glob("ocdbt.process_*")}
    assert writers == {f"ocdbt.process_g0w{n}" for n in range(4)}
    assert checkpoint.latest(tmp_path) == 2
    assert there(tmp_path) == ["2"]

    plain = ocp.StandardCheckpointer().restore(tmp_path / "2")
    assert_same(plain["params"], wanted["params"])
    assert_same(ocp.PyTreeCheckpointer().restore(tmp_path / "2")["params"], wanted["params"])
    assert_same(checkpoint.restore(tmp_path, wanted), wanted)

    here = step_on(4, autopar.ShardParallel(mesh_shape=(2, 2)))
    batch = batches(3)[2]
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), wanted)
    compiled = here.compile(like, batch)
    restored = checkpoint.restore(tmp_path, like, compiled=compiled)
    assert_same(restored, wanted)
    loss = here(restored, batch)[1]

    again = checkpoint.restore(tmp_path, like, compiled=step)
    assert all(isinstance(leaf, RemoteArray) for leaf in jax.tree.leaves(again)), "the workers read it, too"
    assert_same(again, wanted)
    fetched.clear()
    np.testing.assert_allclose(step(again, batch)[1], loss, rtol=1e-5)
    assert fetched == [], "it is where the step wants it"

    checkpoint.save(tmp_path, wanted, 3).wait()  # written here
    again = checkpoint.restore(tmp_path, like, compiled=step)
    assert all(isinstance(leaf, RemoteArray) for leaf in jax.tree.leaves(again))
    assert_same(again, wanted)


def test_state_may_be_donated_while_it_is_written(step, tmp_path):
    """The save returns before anything is written; steps go on and overwrite the state."""
    state = on_workers(step)
    wanted = host(state)

    gate = tmp_path.with_name(f"{tmp_path.name}-open")

    def until_it_is_open(disk, save):
        end = time.monotonic() + PATIENCE_SECONDS
        while not gate.exists():
            assert time.monotonic() < end, "no one has opened the gate"
            time.sleep(0.01)

    in_workers(step, before_writing(until_it_is_open))
    saving = checkpoint.save(tmp_path, state, 1)
    next_state = state
    for batch in batches(2):
        next_state, _ = step(next_state, batch)
    other = checkpoint.save(tmp_path / "other", next_state, 3)
    assert not saving.done(), "the steps were to come first"
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state["params"]))
    gate.touch()
    saving.wait()
    other.wait()
    in_workers(step, as_before())
    assert_same(checkpoint.restore(tmp_path, wanted), wanted)
    assert_same(checkpoint.restore(tmp_path / "other", host(next_state)), host(next_state))
    in_workers(step, no_copies_left())
    with pytest.raises(DonatedError):
        checkpoint.save(tmp_path, state, 2)
    assert there(tmp_path) == ["1", "other"]


def test_who_does_not_see_the_folder_sends_its_arrays(step, tmp_path, fetched):
    """What it alone holds goes through this process; the rest is written as ever."""

    def blind(self):
        module = sys.modules["autopar.runtime.ray.worker.worker"]
        module.own_unseen = module.unseen
        module.unseen = lambda token, *asked: module.own_unseen(token + "-on-another-machine", *asked)

    def healed(self):
        module = sys.modules["autopar.runtime.ray.worker.worker"]
        module.unseen = module.own_unseen

    state = on_workers(step)
    wanted = host(state)
    fetched.clear()
    in_workers(step, blind, [3])
    with pytest.warns(UserWarning, match=r"worker 3 \(mesh 1, host 3\) cannot write to .*does not see"):
        checkpoint.save(tmp_path, state, 0).wait()
    assert 0 < sum(fetched) < sum(leaf.nbytes for leaf in jax.tree.leaves(wanted))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), wanted)
    restored = checkpoint.restore(tmp_path, like, compiled=step)
    in_workers(step, healed, [3])
    assert {type(leaf) for leaf in jax.tree.leaves(restored)} == {RemoteArray, np.ndarray}
    assert_same(restored, wanted)
    step(restored, batches(1)[0])
    assert {p.name for p in (tmp_path / "0").glob("ocdbt.process_*")} >= {"ocdbt.process_g0w0", "ocdbt.process_0"}
    assert not (tmp_path / "0" / "ocdbt.process_g0w3").exists()
    assert_same(checkpoint.restore(tmp_path, wanted), wanted)


def test_a_checkpoint_of_workers_cut_off_anywhere_is_never_good(step, tmp_path):
    checkpoint.save(tmp_path, on_workers(step), 1).wait()
    random = np.random.default_rng(0)
    files = [p for p in (tmp_path / "1").rglob("*") if p.is_file()]
    assert sum("process_g0w" in str(p) for p in files) >= 8
    for file in files:
        whole = file.read_bytes()
        at = int(random.integers(len(whole)))
        for content in (whole[:at], whole + b"\0", whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :]):
            file.write_bytes(content)
            assert checkpoint.latest(tmp_path) is None, (file, len(content), len(whole))
        file.unlink()
        assert checkpoint.latest(tmp_path) is None
        file.write_bytes(whole)
    assert checkpoint.latest(tmp_path) == 1


# Failures: each test leaves workers that work; the last, none.


@pytest.fixture(scope="module")
def ours(ray_started):
    """Two workers of this module's own, which may be ended."""
    cluster = make_cluster(1, 4)
    step = autopar.parallelize(train_step, cluster=cluster, method=TWO_STAGES)
    yield step
    cluster.machine.close()


def begin(step, directory):
    """A state on workers, and a checkpoint of it that is good."""
    state = on_workers(step)
    checkpoint.save(directory, state, 1).wait()
    return state


def fails(saving, words):
    started = time.monotonic()
    with pytest.warns(UserWarning, match="NOT written"), pytest.raises(CheckpointError, match=words) as caught:
        saving.wait()
        saving._thread.join()
    assert time.monotonic() - started < PATIENCE_SECONDS, "no limit was waited for but one that the test has set"
    return caught.value


DTYPES = ("bfloat16", "float16", "bool", "int8", "uint32", "float8_e4m3fn", "float8_e4m3", "complex64")


def test_every_kind_of_leaf(ours, tmp_path, fetched):
    """Dtypes that TensorStore has and others; scalars, empty ones, twice the same; beside what is in this process."""
    arrays = {name: jnp.arange(16).astype(name).reshape(4, 4) for name in DTYPES}
    arrays |= {"scalar": jnp.float32(2.5), "small": jnp.float8_e3m4(0.5), "empty": jnp.zeros((0, 3))}
    first = arrays | {"up": jnp.ones((4, 8)), "down": jnp.ones((8, 4)), "haiku/~/b.1": jnp.ones(2)}

    @autopar.parallelize(cluster=ours.cluster, method=TWO_STAGES)
    def step(state, batch):
        def loss_fn(up, down):
            return jnp.mean((jnp.tanh(batch @ up) @ down) ** 2)

        loss, (up, down) = jax.value_and_grad(loss_fn, (0, 1))(state["up"], state["down"])
        return {**state, "up": state["up"] - up, "down": state["down"] - down}, loss

    batch = np.ones((8, 4), np.float32)
    remote, _ = step(first, batch)
    assert all(isinstance(leaf, RemoteArray) for leaf in jax.tree.leaves(remote))
    wanted = host(remote)
    assert_same({name: wanted[name] for name in arrays}, arrays)
    fetched.clear()
    state = {
        "remote": remote,
        "again": [remote["up"], remote["float8_e4m3"]],
        "numbers": (3, 2.5, True),
        "key": jax.random.key(3),
        "here": jnp.arange(5.0),
        "numpy": np.arange(3),
        "none": None,
        "function": max,
    }
    checkpoint.save(tmp_path, state, 0).wait()
    assert fetched == []
    restored = checkpoint.restore(tmp_path, state | {"remote": wanted, "again": [wanted["up"], wanted["float8_e4m3"]]})
    assert_same(restored["remote"], wanted)
    assert_same(restored["again"], [wanted["up"], wanted["float8_e4m3"]])
    for name in ("key", "here", "numpy"):
        assert_same(restored[name], state[name])
    assert restored["numbers"] == (3, 2.5, True) and restored["function"] is max
    plain = ocp.PyTreeCheckpointer().restore(tmp_path / "0")
    assert_same(plain["remote"]["bfloat16"], arrays["bfloat16"])
    assert_same(plain["again"][0], wanted["up"])

    checkpoint.save(tmp_path, remote, 1).wait()
    there = checkpoint.restore(tmp_path, first, 1, compiled=step)
    assert isinstance(there.pop("empty"), np.ndarray) and fetched == []
    assert all(isinstance(leaf, RemoteArray) for leaf in there.values())
    assert_same(there, {name: wanted[name] for name in there})


def test_a_worker_cannot_write(ours, tmp_path):
    """The disk is full: told with the worker's name; all workers go on, and the next save is whole."""

    def full(disk, save):
        raise OSError(28, "No space left on device")

    state = begin(ours, tmp_path)
    in_workers(ours, before_writing(full), [1])
    saving = checkpoint.save(tmp_path, state, 2)
    error = fails(saving, r"worker 1 \(mesh 1, host 0\): OSError: .*No space left")
    assert "see to the disk" in error.do and error.path == str(tmp_path / "2")
    assert there(tmp_path) == ["1"]
    in_workers(ours, no_copies_left())
    in_workers(ours, as_before())
    wanted = host(state)
    checkpoint.save(tmp_path, state, 2).wait()
    assert_same(checkpoint.restore(tmp_path, wanted), wanted)
    ours(state, batches(1)[0])


def test_a_worker_does_not_come_on(ours, tmp_path, monkeypatch):
    """It answers, and steps; its disk hangs. Told after `wait_seconds`, and no worker is ended."""

    def hang(disk, save):
        while save in disk._tiles:
            time.sleep(0.05)

    state = begin(ours, tmp_path)
    limit = several_times(lambda: checkpoint.save(tmp_path / "other", state, 1).wait(), 0.5)
    in_workers(ours, before_writing(hang), [0])
    monkeypatch.setattr(ours.latest().executable.workers._machine, "wait_seconds", limit)
    saving = checkpoint.save(tmp_path, state, 2)
    error = fails(saving, r"worker 0 \(mesh 0, host 0\), for which the driver waited(.*\n)*.*does not come on")
    assert isinstance(error.__cause__, WorkerError) and error.__cause__.waited_for == 0
    assert there(tmp_path) == ["1", "other"]
    monkeypatch.undo()
    in_workers(ours, as_before())
    state, _ = ours(state, batches(1)[0])
    checkpoint.save(tmp_path, state, 2).wait()


def test_a_worker_is_killed_while_it_writes(ours, tmp_path):
    state = begin(ours, tmp_path)
    wanted = host(state)
    in_workers(ours, before_writing(lambda disk, save: os.kill(os.getpid(), signal.SIGKILL)), [1])
    saving = checkpoint.save(tmp_path, state, 2)
    error = fails(saving, r"worker 1 \(mesh 1, host 0\).*(.*\n)*.*process has ended")
    assert "restore" in error.do and isinstance(error.__cause__, WorkerError)
    assert there(tmp_path) == ["1"], "nothing is left of it"
    with pytest.raises(WorkerError, match="process has ended"):
        checkpoint.save(tmp_path, state, 2)
    with pytest.raises(WorkerError, match="have ended"):
        ours(state, batches(1)[0])
    assert there(tmp_path) == ["1"]
    assert_same(checkpoint.restore(tmp_path, wanted), wanted)


def test_layers_along_another_dim(clusters, tmp_path, fetched):
    """Parts of layers lie behind each other along dim 1: stepped, written and read by the workers, seen whole here."""

    def step(state, batch):
        def loss_fn(kernels):
            layers = jnp.moveaxis(kernels, 1, 0)
            x, _ = jax.lax.scan(lambda x, k: (jnp.tanh(x @ k), None), batch["x"], layers)
            return jnp.mean((x - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state)
        return state - 0.1 * grads, loss

    random = np.random.default_rng(0)
    state = random.normal(size=(8, 4, 8)).astype(np.float32)
    batch = {name: random.normal(size=(8, 8)).astype(np.float32) for name in ("x", "y")}
    far = autopar.parallelize(step, cluster=clusters[1, 4], method=TWO_STAGES, batch_argnums=1)
    got, loss = far(state, batch)
    want, wanted_loss = jax.jit(step)(state, batch)
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    assert (got.shape, got.dim, len(got.parts)) == (want.shape, 1, 2)
    assert got.sharding.shard_shape(got.shape)[1] == 2 and got.sharding == far.latest().in_shardings[0][0]

    fetched.clear()
    checkpoint.save(tmp_path, got, 1).wait()
    like = jax.ShapeDtypeStruct(want.shape, want.dtype)
    again = checkpoint.restore(tmp_path, like, compiled=far)
    assert isinstance(again, RemoteArray) and fetched == [], "bytes of state came here"
    assert_same(again, got)
    assert_same(checkpoint.restore(tmp_path, np.zeros_like(want)), got)
    fetched.clear()
    after, _ = far(again, batch)
    assert fetched == [], "it is where the step wants it"
    np.testing.assert_allclose(np.asarray(after), jax.jit(step)(want, batch)[0], rtol=1e-5, atol=1e-6)
