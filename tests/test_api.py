"""A step is called as `jax.jit`'s is: weak types, static arguments, JAX's settings, methods of classes."""

from __future__ import annotations

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

import autopar
from autopar.errors import AutoparError, StructureChangedError, TraceError

METHOD = autopar.ShardParallel((2, 4))
BATCH = {"x": np.arange(16 * 8, dtype=np.float32).reshape(16, 8) % 7}


def state():
    return {"w": jnp.eye(8)}


def step(state, batch, n=1):
    return {"w": state["w"] + jnp.mean(batch["x"])}, jnp.sum(batch["x"] @ state["w"]) * n


def parallel(fn=step, **settings):
    return autopar.parallelize(fn, method=METHOD, **settings)


def check(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.weak_type == b.weak_type
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=1e-5)


# Types


@pytest.mark.parametrize("scales", [(3, 300), (jnp.asarray(3), jnp.int32(300)), (jnp.int32(300), 3, np.float64(0.5))])
def test_weak_types_are_other_programs(scales):
    def scaled(state, batch, scale):
        return state, batch["x"].astype(jnp.int8) * scale

    ours, jitted = parallel(scaled, donate_argnums=()), jax.jit(scaled)
    for scale in scales:
        check(ours(state(), BATCH, scale), jitted(state(), BATCH, scale))


@pytest.mark.parametrize("method", [METHOD, autopar.PipelineParallel(num_stages=2, num_microbatches=2)])
def test_state_stays_weakly_typed(method):
    """A learning rate that was a Python number does not make a bfloat16 model a float32 one."""

    def train(state, batch):
        def loss_fn(w):
            return jnp.mean((jnp.tanh(batch["x"].astype(jnp.bfloat16) @ w["up"]) @ w["down"]).astype(jnp.float32) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["w"])
        return {"w": jax.tree.map(lambda w, g: w - state["lr"] * g, state["w"], grads), "lr": state["lr"] * 0.9}, loss

    def fresh():
        return {"w": {name: jnp.eye(8, dtype=jnp.bfloat16) for name in ("up", "down")}, "lr": 0.1}

    ours, jitted = autopar.parallelize(train, method=method, batch_argnums=1), jax.jit(train)
    got, expected = (fresh(), 0.0), (fresh(), 0.0)
    for _ in range(3):
        got, expected = ours(got[0], BATCH), jitted(expected[0], BATCH)
        assert [x.weak_type for x in jax.tree.leaves(got)] == [x.weak_type for x in jax.tree.leaves(expected)]
    assert {w.dtype for w in got[0]["w"].values()} == {jnp.bfloat16.dtype}
    assert len(ours._made.compiled) == 1, "the number and the array it becomes are one program"


def test_arrays_of_random_keys():
    def shuffled(state, batch):
        key, own = jax.random.split(state["key"])
        return {**state, "key": key}, jnp.sum(jax.random.normal(own, (16, 8)) * batch["x"])

    new, loss = parallel(shuffled)({**state(), "key": jax.random.key(0)}, BATCH)
    expected, expected_loss = shuffled({**state(), "key": jax.random.key(0)}, BATCH)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert jax.random.key_data(new["key"]).tolist() == jax.random.key_data(expected["key"]).tolist()


def test_64_bits_are_another_program():
    def widest(state, batch):
        return state, jnp.sum(batch["x"].astype(float))

    ours, same = parallel(widest, donate_argnums=()), state()
    assert ours(same, BATCH)[1].dtype == jnp.float32
    with jax.enable_x64(True):
        assert ours(same, BATCH)[1].dtype == jnp.float64
    assert ours(same, BATCH)[1].dtype == jnp.float32


# Static arguments


def test_what_is_known_of_the_last_call(monkeypatch):
    """A call of arrays like the last one is not looked at again; one of others is, and so is the next of these."""
    train, looked = parallel(), []
    key = type(train)._key
    monkeypatch.setattr(type(train), "_key", lambda self, *given: looked.append(1) or key(self, *given))
    batch = {"x": jnp.asarray(BATCH["x"])}
    got, _ = train(state(), batch)
    got, _ = train(got, batch)  # where the step has put it, the state is of the same type
    counted = len(looked)
    got, _ = train(got, batch)
    assert len(looked) == counted
    short = {"x": batch["x"][:8]}
    check(train(jax.tree.map(jnp.copy, got), short), step(got, short))
    assert len(looked) > counted
    check(train(jax.tree.map(jnp.copy, got), batch), step(got, batch))
    with jax.default_matmul_precision("float32"):
        counted = len(looked)
        train(got, batch)
    assert len(looked) > counted, "another setting of JAX is another program"


@pytest.mark.parametrize("given", [{"static_argnums": 2}, {"static_argnums": -1}, {"static_argnames": "n"}])
def test_static_by_position_and_by_name(given):
    ours = parallel(**given, donate_argnums=())
    expected = step(state(), BATCH, 3)[1]
    calls = [((state(), BATCH, 3), {}), ((state(), BATCH), {"n": 3}), ((state(),), {"batch": BATCH, "n": 3})]
    for args, kwargs in [*calls, ((), {"state": state(), "batch": BATCH, "n": 3})]:
        np.testing.assert_allclose(ours(*args, **kwargs)[1], expected, rtol=1e-5)


def test_static_values_of_two_types_are_two_programs():
    def typed(state, batch, n):
        return state, jnp.sum(batch["x"].astype(jnp.int32)) * n

    ours = parallel(typed, static_argnums=2, donate_argnums=())
    assert [ours(state(), BATCH, n)[1].dtype for n in (1, 1.0, True)] == [jnp.int32, jnp.float32, jnp.int32]
    assert len(ours._made.compiled) == 3


def test_static_arguments_that_cannot_be():
    with pytest.raises(TraceError, match="static argument `n` of `step` cannot be hashed"):
        parallel(static_argnums=2)(state(), BATCH, [3])
    with pytest.raises(AutoparError, match="there is no argument 3"):
        parallel(static_argnums=3)
    np.testing.assert_allclose(parallel(static_argnums=None)(state(), BATCH)[1], step(state(), BATCH)[1], rtol=1e-5)


# What is decorated


class Trainer:
    """An object that is no pytree: static, as an argument of `jax.jit` it would have to be named so."""

    def __init__(self, scale):
        self.scale = scale

    @autopar.parallelize(method=METHOD)
    def step(self, state, batch):
        """One step."""
        return step(state, batch, self.scale)


@jax.tree_util.register_pytree_node_class
class Model:
    """An object that is a pytree: its arrays are arguments."""

    def __init__(self, scale):
        self.scale = scale

    @autopar.parallelize(method=METHOD, batch_argnums=2, donate_argnums=1)
    def step(self, state, batch):
        return step(state, batch, self.scale)

    def tree_flatten(self):
        return (self.scale,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@pytest.mark.parametrize("kind", [Trainer, Model])
def test_a_method_of_a_class(kind):
    for scale in (2.0, 3.0):
        trainer = kind(scale)
        new, loss = trainer.step(state(), BATCH)
        np.testing.assert_allclose(loss, step(state(), BATCH, scale)[1], rtol=1e-5)
        trainer.step(new, BATCH)
        assert trainer.step.latest() is not None and trainer.step.plan(new, BATCH).cost.step_seconds > 0
    assert len(kind.step._made.compiled) == (2 if kind is Trainer else 1)
    assert trainer.step.replan()(state(), BATCH)[1] == loss


def test_the_functions_attributes_hide_nothing():
    def fn(state, batch):
        """One step."""
        return step(state, batch)

    fn.plan = fn.compile = fn._fn = "mine"
    ours = parallel(fn)
    assert ours.plan(state(), BATCH).cost.step_seconds > 0 and np.isfinite(ours(state(), BATCH)[1])
    assert (
        ours.__wrapped__ is fn
        and ours.__doc__ == "One step."
        and list(inspect.signature(ours).parameters)[0] == "state"
    )


@pytest.mark.parametrize("given", [42, autopar.DataParallel(), autopar.Auto])
def test_what_is_no_step(given):
    with pytest.raises(AutoparError, match="(?s)no step to parallelize.*method="):
        autopar.parallelize(given)


# Classes of the user's


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Checked:
    """Takes nothing but arrays: neither types nor shardings."""

    w: jax.Array
    b: jax.Array

    def __post_init__(self):
        if not all(isinstance(x, jax.Array | np.ndarray) for x in (self.w, self.b)):
            raise TypeError("no arrays")


def of_checked():
    return {"p": Checked(jnp.eye(8), jnp.zeros(8)), "scale": jmp.DynamicLossScale(jnp.float32(16.0))}


def train_checked(state, batch):
    def loss_fn(p):
        hidden = jnp.tanh(batch["x"] @ p.w + p.b)
        return state["scale"].scale(jnp.mean((hidden @ p.w - 1) ** 2))

    loss, grads = jax.value_and_grad(loss_fn)(state["p"])
    grads = state["scale"].unscale(grads)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["p"], grads)
    return {"p": params, "scale": state["scale"].adjust(jnp.isfinite(loss))}, loss


@pytest.mark.parametrize(
    "method", [autopar.DataParallel(zero=3), autopar.PipelineParallel(num_stages=2, num_microbatches=2)]
)
def test_classes_that_check_their_fields(method):
    """What is known of their arrays is shown in containers of ours; state of theirs is what comes back."""
    ours, jitted = autopar.parallelize(train_checked, method=method), jax.jit(train_checked)
    plan = ours.plan(of_checked(), BATCH)
    shown = plan.shardings[0][0]
    assert list(shown["p"]) == ["w", "b"] and isinstance(shown["p"]["w"], jax.P) and list(shown["scale"]) == ["0", "1"]
    assert isinstance(plan.shardings[0][1]["x"], jax.P) and len(jax.tree.leaves(plan.shardings)) == 5
    got, expected = of_checked(), of_checked()
    for _ in range(2):
        got, expected = ours(got, BATCH)[0], jitted(expected, BATCH)[0]
    check(got, expected)
    with pytest.raises(StructureChangedError, match="takes nothing but arrays"):
        ours.create_state(of_checked, example=(BATCH,))


def test_state_that_is_cast_is_split_all_the_same():
    """Parameters in bfloat16 that come back in float32: ZeRO-3 splits them, and the results are those of `jax.jit`."""

    def train(state, batch):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w).astype(jnp.float32) ** 2))(state["w"])
        return {"w": state["w"].astype(jnp.float32) - 0.1 * grads.astype(jnp.float32)}, loss

    ours, jitted = autopar.parallelize(train, method=autopar.DataParallel(zero=3)), jax.jit(train)
    got = expected = {"w": jnp.eye(8, dtype=jnp.bfloat16)}
    with pytest.warns(UserWarning, match="state/w goes in as bfloat16 and comes out as float32"):
        assert any(ours.plan(got, BATCH).shardings[0][0]["w"])
        for _ in range(2):
            got, expected = ours(got, BATCH)[0], jitted(expected, BATCH)[0]
    np.testing.assert_allclose(got["w"], expected["w"], rtol=1e-2)


@pytest.mark.parametrize("method", [autopar.Auto(), METHOD, autopar.Inference()])
@pytest.mark.parametrize(
    "nothing",
    [lambda state, batch: None, lambda state, batch: state, lambda state, batch: 3.0],
    ids=["None", "state", "3"],
)
def test_a_step_that_computes_nothing(nothing, method):
    run = autopar.parallelize(nothing, method=method)
    check(run(state(), BATCH), jax.jit(nothing)(state(), BATCH))
    assert run.latest().plan.cost.step_seconds == 0
