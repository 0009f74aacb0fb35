"""Each host reads its own portion of the batches: equal to one device, and nothing of it goes through the driver."""

from __future__ import annotations

import pickle

import jax
import numpy as np
import pytest

import autopar
from autopar.errors import BatchError, NotBuiltYetError
from autopar.runtime.ray.driver.handles import RemoteArray
from tests.ray.cluster import make_cluster
from tests.small_mlp import make_params, train_step
from tests.sweep import _host

pytestmark = pytest.mark.ray
ROWS, NUM_BATCHES = 8, 4


def reader(log=None, rows=ROWS, count=NUM_BATCHES, change=lambda host, hosts, k, part: part, **more):
    """`batches(host, hosts)`; who opened what, and drew which batch, goes to files."""
    import numpy as np

    def batches(host, hosts):
        own = rows // hosts
        for k in range(count):
            if log is not None:
                (log / f"{host} of {hosts} drew {k}").write_text("x")
            random = np.random.default_rng(k)
            whole = {name: random.normal(size=(rows, 16)).astype(np.float32) for name in ("x", "y")} | more
            part = {n: a[host * own : (host + 1) * own] if np.ndim(a) else a for n, a in whole.items()}
            part = change(host, hosts, k, part)
            if part is None:
                return
            yield part

    return batches


def one_device(batches, step=train_step):
    state, losses = make_params(2, 16), []
    for batch in batches(0, 1):
        state, loss = jax.jit(step)(state, batch)
        losses.append(float(loss))
    return state, losses


def check(found, want):
    state, metrics = found
    np.testing.assert_allclose([float(m) for m in metrics.values()], want[1], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(_host(a), b, atol=1e-5), state, want[0])


@pytest.fixture(scope="module")
def two_hosts(ray_started):
    cluster = make_cluster(2, 1)
    yield autopar.parallelize(train_step, cluster=cluster, method="ddp", batch_argnums=(1,))
    cluster.machine.close()


def test_each_reads_its_own(two_hosts, tmp_path):
    batches = reader(tmp_path)
    check(autopar.fit(two_hosts, make_params(2, 16), batches), one_device(reader()))
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == ["0 of 1 drew 0", *(f"{h} of 2 drew {k}" for h in range(2) for k in range(NUM_BATCHES))]


def test_nothing_goes_through_the_driver(two_hosts, monkeypatch):
    """What a step sends does not grow with the batch; in a loop of one's own."""

    def bytes_of(rows):
        calls = []
        state = make_params(2, 16)
        for number, batch in enumerate(autopar.batches(reader(rows=rows), two_hosts, state)):
            assert isinstance(batch["x"], RemoteArray) and batch["x"].shape == (rows, 16)
            whole = next(iter(reader(rows=rows)(0, 1)))
            if number == 0:
                np.testing.assert_array_equal(np.asarray(batch["x"]), whole["x"])
            state, loss = two_hosts(state, batch)
            if number == 0:  # state is there from now on
                workers = two_hosts.latest().executable.workers
                for name in ("call", "begin"):
                    send = getattr(workers, name)
                    monkeypatch.setattr(
                        workers,
                        name,
                        lambda m, a, *r, s=send, **k: calls.append(pickle.dumps((m, a))) or s(m, a, *r, **k),
                    )
        monkeypatch.undo()
        return sum(map(len, calls))

    assert abs(bytes_of(ROWS) - bytes_of(64 * ROWS)) < 200, "numbers of arrays may take a byte more"


def test_a_run_goes_on(two_hosts, tmp_path):
    """With positions, and with another number of hosts; what each host has drawn, it does not draw again."""
    log, run = tmp_path / "log", tmp_path / "run"
    log.mkdir()
    own = reader(log)

    class Loader:
        def __init__(self, host, hosts):
            self.make, self.place = lambda: own(host, hosts), 0

        def __iter__(self):
            return Iterator(self.make)

    class Iterator:
        def __init__(self, make):
            self.make, self.place = make, 0

        def __next__(self):
            import itertools

            found = next(itertools.islice(self.make(), self.place, None), None)
            if found is None:
                raise StopIteration
            self.place += 1
            return found

        def __iter__(self):
            return self

        def get_state(self):
            return str(self.place).encode()

        def set_state(self, state):
            self.place = int(state)

    want, options = one_device(reader()), {"checkpoint_dir": run, "save_every": 2}
    state, first = autopar.fit(
        two_hosts, make_params(2, 16), lambda host, hosts: Loader(host, hosts), num_steps=2, **options
    )
    note = autopar.checkpoint.folder.read_note(run, 2)["position"]
    assert note["hosts"] == 2 and len(note["parts"]) == 2 and None not in note["parts"]
    state, then = autopar.fit(
        two_hosts, make_params(2, 16), lambda host, hosts: Loader(host, hosts), num_steps=3, **options
    )
    assert list(then) == [2]
    here = autopar.parallelize(
        train_step, cluster=autopar.Cluster.local(jax.devices()[:2]), method="ddp", batch_argnums=(1,)
    )
    state, last = autopar.fit(here, make_params(2, 16), lambda host, hosts: Loader(host, hosts), **options)
    assert list(last) == [3]
    check((state, first | then | last), want)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda host, hosts, k, part: None if host == 1 and k == 2 else part, "host=1, hosts=2.*has ended.*host=0"),
        (
            lambda host, hosts, k, part: (
                {n: a[: 4 - (hosts == 2 and host)] for n, a in part.items()} if k == 1 else part
            ),
            r"step 1.*host=1, hosts=2.*float32\[3, 16\].*host=0.*float32\[4, 16\].*same number of rows",
        ),
        (
            lambda host, hosts, k, part: part if hosts == 1 or not host else [part][k],
            r"host=1, hosts=2.*step 1, on worker 1.*IndexError: list index out of range, at .*test_hosts.py:\d+",
        ),
    ],
    ids=["length", "shape", "raises"],
)
def test_what_does_not_fit_together(two_hosts, change, words):
    """It says whose; the workers go on."""
    with pytest.raises(BatchError, match=f"(?s){words}"):
        autopar.fit(two_hosts, make_params(2, 16), reader(change=change))
    assert not two_hosts.latest().executable.closed


def test_what_cannot_be_sent(two_hosts):
    import threading

    lock = threading.Lock()
    change = lambda host, hosts, k, part: part if lock else part  # noqa: E731
    with pytest.raises(NotBuiltYetError, match=r"(?s)batches\(host, hosts\).*pickled.*when it is called"):
        autopar.fit(two_hosts, make_params(2, 16), reader(change=change))


def masked_step(params, batch):
    def loss_fn(params):
        x = batch["x"]
        for kernel in params:
            x = jax.numpy.tanh(x @ kernel)
        losses = jax.numpy.mean((x - batch["y"]) ** 2, axis=1) * batch["weight"]
        return jax.numpy.sum(losses * batch["mask"]) / jax.numpy.sum(batch["mask"])

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def test_the_last_batch_is_smaller(two_hosts):
    """Kept (a plan of its own, and the same parts), padded (here), dropped; and numbers beside the arrays."""
    step = autopar.parallelize(masked_step, cluster=two_hosts.cluster, method="ddp", batch_argnums=(1,))

    def change(host, hosts, k, part):
        return {n: a[: 4 // hosts] if k == 2 and np.ndim(a) else a for n, a in part.items()}

    more = {"mask": np.ones(ROWS, np.float32), "weight": np.float32(2)}
    batches = reader(change=change, count=3, **more)

    def whole(host, hosts):
        for k, batch in enumerate(reader(count=3, **more)(0, 1)):
            rows = [0, 1, 4, 5] if k == 2 else range(ROWS)  # of each host's part the first half
            yield {n: a[list(rows)] if np.ndim(a) else a for n, a in batch.items()}

    want = one_device(whole, masked_step)
    for remainder in ("keep", "pad"):
        check(autopar.fit(step, make_params(2, 16), batches, remainder=remainder), want)
    _, metrics = autopar.fit(step, make_params(2, 16), batches, remainder="drop")
    assert list(metrics) == [0, 1]
    with pytest.raises(BatchError, match="another number of rows"):
        autopar.fit(step, make_params(2, 16), batches, remainder="error")


def test_evaluation_reads_its_own_too(two_hosts, tmp_path):
    log, rows = tmp_path, []
    follower = autopar.follow(lambda params, batch: train_step(params, batch)[1], two_hosts)
    autopar.fit(
        two_hosts,
        make_params(2, 16),
        reader(count=1),
        eval_step=follower,
        eval_batches=reader(log, count=2),
        loggers=lambda step, values: rows.append(values),
    )
    state, _ = one_device(reader(count=1))
    want = np.mean([float(train_step(state, batch)[1]) for batch in reader(count=2)(0, 1)])
    np.testing.assert_allclose(rows[-1]["eval/loss"], want, rtol=1e-5)
    assert {path.name for path in log.iterdir()} >= {"0 of 2 drew 1", "1 of 2 drew 1"}


def test_pipeline(ray_started):
    """A stage on one host and one over two; which rows of microbatches a host then reads, `test_rows.py` says."""
    cluster = make_cluster(3, 1)
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=2, submeshes=(1, 2))
    step = autopar.parallelize(train_step, cluster=cluster, method=method, batch_argnums=(1,))
    check(autopar.fit(step, make_params(2, 16), reader()), one_device(reader()))
    cluster.machine.close()
