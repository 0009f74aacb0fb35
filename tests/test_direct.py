"""Calls that JAX's own dispatch carries out: as right as checked ones, and as clear where they cannot be."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.errors import DonatedError, StepError, StructureChangedError

BATCH = {"x": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)}


def step(state, batch, power=1):
    def loss_fn(w):
        return jnp.mean(jnp.sqrt(batch["x"] @ w) ** (2 * power))

    loss, grad = jax.value_and_grad(loss_fn)(state["w"])
    return {"w": state["w"] - 0.1 * grad, "count": state["count"] + 1}, loss


def first():
    return {"w": jnp.full(4, 3.0), "count": 0}


def positive():
    return {"x": jnp.abs(jnp.asarray(BATCH["x"]))}


def on_one_device(fn=step, **settings):
    return autopar.parallelize(fn, cluster=autopar.Cluster.local(jax.devices()[:1]), **settings)


def check(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.weak_type == b.weak_type
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.fixture
def checked(monkeypatch):
    """Counts calls with all checks."""
    counted = []
    kind = autopar.step.ParallelStep
    whole = kind._checked
    monkeypatch.setattr(kind, "_checked", lambda self, *a, **k: counted.append(1) or whole(self, *a, **k))
    return counted


def test_what_is_known_passes_by_the_checks(checked):
    """And what is of another structure, shape, place, value or setting does not."""
    ours, plain = on_one_device(static_argnames="power"), jax.jit(step, static_argnames="power")
    state, expected = first(), first()

    def both(batch, **static):
        nonlocal state, expected
        before = len(checked)
        (state, loss), (expected, other) = ours(state, batch, **static), plain(expected, batch, **static)
        check((state, loss), (expected, other))
        return len(checked) - before

    assert [both(positive()) for _ in range(5)] == [1, 1, 1, 0, 0]  # planned; from where it is put; told how; known
    on_host = {"x": np.asarray(positive()["x"])}
    assert [both(on_host) for _ in range(2)] == [1, 0]
    assert both({"x": positive()["x"][:4]}) and both(positive(), power=2) and both(positive(), power=2.0)
    with jax.default_matmul_precision("float32"):
        assert both(positive())
    assert both(positive()) == 0
    state = dict(jax.device_put(state, jax.devices()[1]))
    assert both(positive()) == 1
    assert both(positive()) == 0


def test_random_keys(checked):
    def noisy(state, batch):
        key, own = jax.random.split(state["key"])
        return {"key": key, "w": state["w"] + jax.random.normal(own, (4,))}, batch["x"].sum()

    ours, plain = on_one_device(noisy), jax.jit(noisy)
    state = expected = {"key": jax.random.key(3), "w": jnp.zeros(4)}
    for _ in range(5):
        state, expected = ours(state, positive())[0], plain(expected, positive())[0]
        assert (jax.random.key_data(state["key"]) == jax.random.key_data(expected["key"])).all()
        np.testing.assert_allclose(state["w"], expected["w"], rtol=1e-5)
    assert len(checked) == 3


def called(ours, times=4):
    """A state after so many calls: the last ones pass by the checks."""
    state = first()
    for _ in range(times):
        state, _ = ours(state, positive())
    return state


@pytest.mark.parametrize("kind", ["step", "compiled"])
def test_memory_that_is_gone(kind):
    ours = on_one_device()
    state = called(ours)
    run = ours if kind == "step" else ours.compile(state, positive())
    for _ in range(3):
        old, (state, _) = state, run(state, positive())
    with pytest.raises(DonatedError, match="pass what the last call returned") as caught:
        run(old, positive())
    assert set(caught.value.paths) == {"state/count", "state/w"}
    state["w"].delete()
    with pytest.raises(DonatedError):
        run(state, positive())
    check(run(called(ours), positive()), jax.jit(step)(called(jax.jit(step)), positive()))


def test_memory_that_is_passed_twice():
    def towards(state, target, batch):
        grad = jax.grad(lambda w: jnp.sum((batch["x"] @ (w - target)) ** 2))(state)
        return state - 0.01 * grad + 1

    ours = on_one_device(towards, batch_argnums=2)
    state, target = jnp.ones(4), jnp.zeros(4)
    for _ in range(4):
        state = ours(state, target, positive())
    for _ in range(3):
        host = np.asarray(state).copy()
        kept, state = state, ours(state, state, positive())
        np.testing.assert_allclose(state, towards(host, host, positive()), rtol=1e-5)
        np.testing.assert_array_equal(kept, host)  # what is only read is there afterwards


def test_other_arguments_of_a_compiled_step():
    compiled = on_one_device().compile(first(), positive())
    assert repr(compiled).startswith("<compiled step; Plan(step by Auto(), ")
    state = first()
    for _ in range(4):
        state, _ = compiled(state, positive())
    with pytest.raises(StructureChangedError, match=r"batch/x is float32\[4,4\]"):
        compiled(state, {"x": positive()["x"][:4]})
    compiled(state, positive())


@pytest.mark.parametrize("around", [lambda: None, lambda: jnp.ones(4).std()], ids=["", "a deviation"])
def test_a_number_that_is_none(around):
    ours = on_one_device()
    state = called(ours)
    around()  # after `jnp.std`, JAX's own dispatch looks at no number of the thread any more
    jax.config.update("jax_debug_nans", True)
    try:
        with pytest.raises(StepError, match="nan") as caught:
            ours(state, {"x": -positive()["x"]})
    finally:
        jax.config.update("jax_debug_nans", False)
    assert isinstance(caught.value.__cause__, FloatingPointError) and "test_direct.py" in caught.value.source
    called(ours)


def test_the_users_own_exceptions(checked):
    """They pass through unchanged, and the next call of the same arguments is tried again."""
    mood = ["bad"]

    def moody(state, batch):
        if mood[0] == "bad" and batch["x"].shape[0] == 4:
            raise ValueError("not today")
        return step(state, batch)

    ours = on_one_device(moody)
    state, short = called(ours), {"x": positive()["x"][:4]}
    with pytest.raises(ValueError, match="not today"):
        ours(state, short)
    mood[0] = "good"
    for _ in range(4):
        state, _ = ours(state, short)
    before = len(checked)
    ours(state, short)
    assert len(checked) == before
