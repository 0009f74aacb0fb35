"""What the user holds: arrays on workers that look like arrays, and travel no more than they must."""

from __future__ import annotations

import gc
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import DonatedError, WorkerError
from autopar.runtime.ray.driver.handles import RemoteArray
from tests.models.registry import CASES
from tests.ray.cluster import make_cluster
from tests.small_mlp import make_batch, make_params, train_step
from tests.sweep import QUICK, SLOW, _host
from tests.test_uneven_parts import close, make_arguments
from tests.test_uneven_parts import step as seven_layers

pytestmark = pytest.mark.ray


def counts(step):
    workers = step.latest().executable.workers
    return list(workers.call("counts", {seat.number: () for seat in workers.seats}).values())


def make_step(cluster, case, **options):
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=2)
    return autopar.parallelize(case.step, cluster=cluster, method=method, batch_argnums=(1,), **options)


def assert_same(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(_host(a), _host(b)), got, want)


@pytest.fixture(scope="module")
def ran(clusters):
    """A step of stacked layers that has run once, its state, its metrics."""
    case = CASES["gpt_scan"]()
    step = make_step(clusters[1, 4], case)
    return case, step, *step(case.state, case.batches[0])


def test_state_looks_like_arrays(ran):
    case, step, state, metrics = ran
    leaves, before = jax.tree.leaves(state), jax.tree.leaves(case.state)
    assert all(isinstance(x, RemoteArray) for x in leaves)
    for got, want in zip(leaves, before, strict=True):
        assert (got.shape, got.dtype, got.ndim, got.size, got.nbytes) == (
            want.shape,
            want.dtype,
            want.ndim,
            want.size,
            want.nbytes,
        )
        assert np.asarray(got).shape == got.shape and np.asarray(got).dtype == got.dtype
        assert not got.is_deleted() and got.block_until_ready() is got
    assert jax.tree.map(lambda x: x.sharding, state) == step.latest().in_shardings[0][0]
    assert any(len(x.parts) > 1 for x in leaves), "stacked layers lie on both stages"
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(metrics))


def test_there_is_no_arithmetic_before_it_is_fetched(ran):
    _, _, state, _ = ran
    x = next(x for x in jax.tree.leaves(state) if x.ndim == 2)
    with pytest.raises(TypeError):
        x + 1
    with pytest.raises(TypeError):
        jnp.sin(x)
    assert (x.fetch() + 1).shape == x.shape
    assert f"RemoteArray(shape={x.shape}, dtype={x.dtype}, on mesh" in repr(x)


def test_a_copy_is_a_copy(ran):
    """Fetched arrays are as NumPy wants them: to look at, or one's own to write to."""
    _, _, state, _ = ran
    for is_stacked in (False, True):
        x = next(x for x in jax.tree.leaves(state) if (len(x.parts) > 1) == is_stacked)
        want = np.asarray(x).copy()
        own = np.array(x)
        own += 1
        np.testing.assert_array_equal(own, want + 1)
        np.testing.assert_array_equal(np.asarray(x), want)
        assert np.array(x, np.float64).dtype == np.float64 and np.asarray(x, np.float32).dtype == np.float32
        if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
            with pytest.raises(ValueError, match="cannot be had without a copy"):
                np.array(x, copy=False)


def test_scalars_become_numbers(clusters):
    case = CASES["mlp_schedule_clip"]()
    state, _ = make_step(clusters[1, 4], case)(case.state, case.batches[0])
    scalar = next(x for x in jax.tree.leaves(state) if x.shape == () and x.dtype == np.int32)
    assert int(scalar) == 1 == scalar.item() and float(scalar) == 1.0 and bool(scalar)
    with pytest.raises(TypeError):
        len(scalar)


def test_donated_arrays_are_deleted(clusters):
    case = CASES["mlp_schedule_clip"]()
    step = make_step(clusters[1, 4], case)
    first, _ = step(case.state, case.batches[0])
    second, _ = step(first, case.batches[1])
    leaf = jax.tree.leaves(first)[0]
    assert leaf.is_deleted() and not jax.tree.leaves(second)[0].is_deleted()
    for use in (lambda: np.asarray(leaf), lambda: step(first, case.batches[0]), leaf.block_until_ready):
        with pytest.raises(DonatedError, match="this array has been deleted(.*\n)*.*it was donated") as info:
            use()
    assert info.value.shape == leaf.shape and isinstance(info.value, RuntimeError)
    step(second, case.batches[2])  # nothing is broken by that


def test_state_that_lies_elsewhere_is_fetched_once(two_hosts, monkeypatch):
    """Two workers of another job want parts of it: it comes here once; and what fails before a step loses nothing."""
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=2)
    pipeline = autopar.parallelize(train_step, cluster=two_hosts, method=method)
    flat = autopar.parallelize(train_step, cluster=two_hosts, method=autopar.ShardParallel())
    params, batch = make_params(2, 8), make_batch(4, 8)
    flat(params, batch)
    state, _ = pipeline(params, batch)
    workers, mine = pipeline.latest().executable.workers, flat.latest().executable.workers
    assert workers is not mine and len(mine.seats) == 2
    keys, fetch = [], workers.fetch
    monkeypatch.setattr(workers, "fetch", lambda mesh, key, kind: (keys.append((mesh, key)), fetch(mesh, key, kind))[1])
    got, _ = flat(state, batch)
    assert sorted(keys) == sorted((p.copies[0].mesh, p.copies[0].key) for x in state for p in x.parts)

    gone = got[0].parts[0].copies[0].key
    del got

    def broken(*args):
        raise MemoryError

    monkeypatch.setattr(workers, "fetch", broken)
    with pytest.raises(MemoryError):
        flat(state, batch)
    assert gone in mine.take_released()[0]


def test_without_donation_the_old_state_stays(clusters):
    case = CASES["mlp_schedule_clip"]()
    step = make_step(clusters[1, 4], case, donate_argnums=())
    first, _ = step(case.state, case.batches[0])
    one, two = step(first, case.batches[1]), step(first, case.batches[1])
    assert_same(one, two)
    assert not any(x.is_deleted() for x in jax.tree.leaves(first))


@pytest.fixture
def two_hosts(ray_started):
    cluster = make_cluster(2, 1)
    yield cluster
    cluster.machine.close()


@pytest.fixture
def own_cluster(ray_started):
    """A cluster whose workers are no other test's."""
    cluster = make_cluster(1, 2)
    yield cluster
    cluster.machine.close()


def pass_on(cluster, change, donated):
    """A step whose state has parts that it does not train."""

    def step(state, batch):
        params, loss = train_step(state["params"], batch)
        return {"params": params} | change(state), loss

    method = autopar.PipelineParallel(num_stages=2, num_microbatches=2)
    return autopar.parallelize(step, cluster=cluster, method=method, batch_argnums=(1,), donate_argnums=donated)


def test_what_a_step_passes_on_survives_the_next(own_cluster):
    """Two handles of one array: a step that takes the memory of one leaves the other alone, as plain jit does."""
    keep = pass_on(own_cluster, lambda s: {"frozen": s["frozen"], "twice": s["frozen"]}, ())
    take = pass_on(own_cluster, lambda s: {"frozen": s["frozen"] * 2, "twice": s["twice"] + 1}, (0,))
    batch, ones = make_batch(4, 8), np.ones(3, np.float32)
    first, _ = keep({"params": make_params(2, 8), "frozen": ones, "twice": ones}, batch)
    second, _ = keep(first, batch)
    third, _ = take(second, batch)
    np.testing.assert_array_equal(np.asarray(first["frozen"]), ones)
    np.testing.assert_array_equal(np.asarray(first["twice"]), ones)
    np.testing.assert_array_equal(np.asarray(third["frozen"]) + np.asarray(third["twice"]), 4 * ones)


def test_a_look_that_fails_ends_nothing(own_cluster):
    import ray

    step = pass_on(own_cluster, lambda s: {}, ())
    state, _ = step({"params": make_params(2, 8)}, make_batch(4, 8))
    leaf, other = state["params"]
    copy = leaf.parts[0].copies[0]
    ray.get(step.latest().executable.workers._actors[0].drop.remote([copy.key]))
    with pytest.raises(WorkerError, match="KeyError(.*\n)*.*the workers go on"):
        np.asarray(leaf)
    assert np.asarray(other).shape == (8, 8)
    step({"params": make_params(2, 8)}, make_batch(4, 8))


def test_what_no_one_holds_is_let_go_of(clusters):
    case = CASES["mlp_schedule_clip"]()
    step = make_step(clusters[1, 4], case, donate_argnums=())
    state, _ = step(case.state, case.batches[0])
    state, _ = step(state, case.batches[0])
    gc.collect()
    state, _ = step(state, case.batches[0])
    before = counts(step)
    for _ in range(3):
        state, _ = step(state, case.batches[0])
    assert [c["arrays"] for c in counts(step)] == [c["arrays"] for c in before]


def test_state_goes_from_step_to_step(clusters):
    """A batch of another size is another program; state goes on from one to the other, also where it lies otherwise."""
    case = CASES["mlp_schedule_clip"]()
    small = jax.tree.map(lambda x: x[: len(x) // 2], case.batches[1])
    step = make_step(clusters[1, 4], case)
    flat = autopar.parallelize(case.step, cluster=clusters[1, 4], method=autopar.ShardParallel(), batch_argnums=(1,))
    state, _ = step(case.state, case.batches[0])
    state, _ = step(state, small)
    state, metrics = flat(state, case.batches[2])

    want = case.state
    for batch in (case.batches[0], small, case.batches[2]):
        want, want_metrics = jax.jit(case.step)(want, batch)
    for got, wanted in zip(jax.tree.leaves((state, metrics)), jax.tree.leaves((want, want_metrics)), strict=True):
        np.testing.assert_allclose(_host(got), _host(wanted), rtol=2e-5, atol=1e-6)


def test_state_is_born_in_its_place(clusters):
    def init(key):
        keys = jax.random.split(key, 4)
        return [jax.random.normal(k, (16, 16)) / 4 for k in keys]

    batch = make_batch(8, 16)
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=2)
    step = autopar.parallelize(train_step, cluster=clusters[1, 4], method=method)
    params = step.create_state(init, jax.random.key(3), example=(batch,))
    assert all(isinstance(p, RemoteArray) for p in params)
    assert [p.parts[0].copies[0].mesh for p in params] == [0, 0, 1, 1]
    for got, want in zip(params, jax.jit(init)(jax.random.key(3)), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    new, loss = step(params, batch)
    want, wanted = jax.jit(train_step)(jax.jit(init)(jax.random.key(3)), batch)
    np.testing.assert_allclose(float(loss), float(wanted), rtol=1e-5)
    np.testing.assert_allclose(np.asarray(new[0]), np.asarray(want[0]), rtol=1e-5, atol=1e-6)


def test_captured_arrays_are_sent_once(clusters):
    table = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    constant = jnp.asarray(np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32))

    def step(params, x):
        def loss(params):
            return jnp.mean((jnp.tanh(x @ params[0] @ constant) @ params[1]) ** 2) + table.sum() * 1e-6

        value, grads = jax.value_and_grad(loss)(params)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value

    params = [np.eye(16, dtype=np.float32)] * 2
    x = np.random.default_rng(1).normal(size=(8, 16)).astype(np.float32)
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=2)
    on_ray = autopar.parallelize(step, cluster=clusters[1, 4], method=method)
    here = autopar.parallelize(
        step, cluster=autopar.Cluster.local(jax.devices()[:4], device=SLOW, intra=QUICK, inter=QUICK), method=method
    )
    got, want = on_ray(params, x), here(params, x)
    assert_same(on_ray(got[0], x), here(want[0], x))


def test_a_step_that_follows_takes_the_state_as_it_lies(clusters, monkeypatch):
    case = CASES["mlp_schedule_clip"]()
    train = autopar.parallelize(
        case.step, cluster=clusters[1, 4], method=autopar.ShardParallel(), batch_argnums=(1,), donate_argnums=(0,)
    )
    state, _ = train(case.state, case.batches[0])
    want = jax.jit(case.step)(case.state, case.batches[0])
    want = jax.jit(lambda state, batch: case.step(state, batch)[1])(want[0], case.batches[1])
    evaluate = autopar.follow(lambda state, batch: case.step(state, batch)[1], train)

    def moved(*args):
        raise AssertionError("state was fetched")

    monkeypatch.setattr(train.latest().executable.workers, "fetch", moved)
    got = evaluate(state, case.batches[1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), got, want)


def test_large_messages(clusters):
    """What is large goes through shared memory, and is the same as in one process; it is copied at most twice."""

    params, batch = make_params(4, 256), make_batch(4096, 256)
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=4)
    on_ray = autopar.parallelize(train_step, cluster=clusters[1, 4], method=method)
    here = autopar.parallelize(
        train_step,
        cluster=autopar.Cluster.local(jax.devices()[:4], device=SLOW, intra=QUICK, inter=QUICK),
        method=method,
    )
    got, want = on_ray(params, batch), here(params, batch)
    before = counts(on_ray)
    for _ in range(3):
        got, want = on_ray(got[0], batch), here(want[0], batch)
        assert_same(got, want)
    after = counts(on_ray)
    sent, copied = (
        sum(b[key] - a[key] for a, b in zip(before, after, strict=True)) for key in ("sent_bytes", "copied_bytes")
    )
    assert sent >= 3 * 2 * 4096 * 256 * 4, "activations and their gradients cross"
    assert copied <= 2 * sent


def test_small_messages_go_through_sockets(clusters):
    """Both ways would give the same; a message through a call of Ray's costs three times as much."""
    import ray

    case = CASES["mlp_schedule_clip"]()
    step = make_step(clusters[1, 4], case)
    step(case.state, case.batches[0])

    def inboxes(self):
        return [t.name for t in sys.modules["threading"].enumerate()].count("inbox")

    actors = step.latest().executable.workers._actors.values()
    assert all(ray.get(actor.__ray_call__.remote(inboxes)) == 1 for actor in actors)


def test_inference(clusters):
    """Results that are no state come back as arrays."""

    def predict(params, x):
        for kernel in params:
            x = jnp.tanh(x @ kernel)
        return {"out": x, "largest": x.max(), "constant": 3.0}

    random = np.random.default_rng(0)
    params = [random.normal(size=(12, 12)).astype(np.float32) / 4 for _ in range(4)]
    x = random.normal(size=(8, 12)).astype(np.float32)
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=4, schedule="inference")
    made = autopar.parallelize(predict, cluster=clusters[1, 4], method=method, batch_argnums=(1,))(params, x)
    want = jax.jit(predict)(params, x)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(made))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), made, want)


def test_layers_that_stages_do_not_divide(clusters):
    """Four and three of seven layers, in loops: what lies on the workers is such parts."""
    state, batch = make_arguments()
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=4)
    step = autopar.parallelize(seven_layers, cluster=clusters[1, 4], method=method, batch_argnums=(1,))
    want, _ = jax.jit(seven_layers)(state, batch)
    got, _ = step(state, batch)
    kernel = got["params"]["layers"]["kernel"]
    assert len(kernel.parts) > 1 and len({part.copies[0].kind.shape for part in kernel.parts}) > 1
    assert kernel.shape == want["params"]["layers"]["kernel"].shape
    close(got, want)
    close(step(got, batch), jax.jit(seven_layers)(want, batch))
