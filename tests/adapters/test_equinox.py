"""Steps on Equinox modules as they are: what `eqx.filter_jit` makes of them, leaf by leaf."""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.errors import TraceError
from tests.adapters.test_nnx import METHODS, PLAIN, batches

ADAM = optax.adam(1e-2, eps=1e-3)


class Net(eqx.Module):
    """Holds functions, flags, a string, a class, and the statistics of its norm by index."""

    layers: list[eqx.nn.Linear]
    activation: Callable
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    name: str
    kind: type
    shift: np.ndarray

    def __init__(self, key):
        self.layers = [eqx.nn.Linear(16, 16, key=k) for k in jax.random.split(key, 2)]
        self.activation, self.name, self.kind = jnp.tanh, "net", np.float32
        self.shift = np.full(16, 0.1, self.kind)
        self.norm = eqx.nn.BatchNorm(16, axis_name="batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.2)

    def __call__(self, x, state, key):
        x = self.activation(self.layers[0](x)) + self.shift
        x, state = self.norm(x, state)
        return self.layers[1](self.dropout(x, key=key)), state


def make():
    model, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
    return model, state, ADAM.init(eqx.filter(model, eqx.is_inexact_array))


def train_step(model, state, opt_state, batch, key, optimizer, *, scale=2):
    @eqx.filter_value_and_grad(has_aux=True)
    def loss_fn(model, state):
        keys = jax.random.split(key, batch["x"].shape[0])
        forward = jax.vmap(model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
        out, state = forward(batch["x"], state, keys)
        return scale * jnp.mean((out - batch["y"]) ** 2), state

    (loss, state), grads = loss_fn(model, state)
    updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), state, opt_state, loss


def check(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if eqx.is_array(b):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)
        else:
            assert a is b or (type(a) is type(b) and a == b)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_a_step_as_under_filter_jit(method):
    ours, theirs = make(), make()
    step, jitted = autopar.parallelize(train_step, method=method), eqx.filter_jit(train_step)
    for number, batch in enumerate(batches()):
        rest = (batch, jax.random.key(number), ADAM)
        *ours, loss = step(*ours, *rest, scale=2)
        *theirs, expected = jitted(*theirs, *rest, scale=2)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    check(ours, theirs)
    assert len(step._made.compiled) == 1 and ours[0].activation is jnp.tanh
    roles = {value.name: value.role for value in step.plan(*ours, *rest, scale=2).values}
    assert roles["model/layers/0/weight"] == roles["opt_state/0/mu/layers/1/bias"] == "state"
    assert roles["batch/x"] == "batch" and "optimizer/init" not in roles


def test_what_is_no_array_is_part_of_the_program():
    """Numbers too; results that are no arrays come out as they are."""

    def step(model, batch, count):
        return jax.vmap(model)(batch["x"][:count]), {"count": count, "act": model.activation}, None

    batch = batches()[0]
    model = eqx.nn.MLP(16, 4, 8, 1, key=jax.random.key(0))
    ours, jitted = autopar.parallelize(step, method=PLAIN, batch_argnums=1), eqx.filter_jit(step)
    for count in (8, 16, 8):
        got, expected = ours(model, batch, count), jitted(model, batch, count)
        check(got, expected)
        assert got[1]["count"] == count and got[0].shape == (count, 4)
    assert len(ours._made.compiled) == 2
    with pytest.raises(
        TraceError, match="(?s)no array in the arguments of `step` cannot be hashed.*unhashable type: 'set'"
    ):
        ours(model, batch, {1, 2})


def test_modules_of_arrays_go_as_under_jit():
    """What `eqx.partition` gives: a number beside it is traced, as ever."""
    params, static = eqx.partition(eqx.nn.MLP(16, 16, 8, 1, key=jax.random.key(0)), eqx.is_array)

    def step(params, batch, rate):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(jax.vmap(eqx.combine(p, static))(batch["x"]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), loss

    ours = autopar.parallelize(step, method=PLAIN)
    for rate in (0.1, 0.2):
        params, _ = ours(params, batches()[0], rate)
    assert len(ours._made.compiled) == 1


def test_filter_jit_inside_compiled_followed_and_created():
    rest = (batch, key, _) = batches()[0], jax.random.key(1), ADAM
    step = autopar.parallelize(eqx.filter_jit(train_step), method=autopar.DataParallel(zero=3))
    ours = step.create_state(make, example=rest)
    check(ours, eqx.filter_jit(make)())
    assert any(ours[0].layers[0].weight.sharding.spec) and ours[0].name == "net"
    *ours, loss = step.compile(*ours, *rest)(*ours, *rest)
    *theirs, expected = eqx.filter_jit(train_step)(*make(), *rest)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    check(ours, theirs)
    model, state = ours[0], ours[1]

    def evaluate(model, state, batch):
        model = eqx.nn.inference_mode(model)
        return jax.vmap(model, axis_name="batch", in_axes=(0, None, None), out_axes=(0, None))(batch["x"], state, key)[
            0
        ]

    np.testing.assert_allclose(
        autopar.follow(evaluate, step)(model, state, batch), evaluate(*theirs[:2], batch), rtol=1e-4, atol=1e-5
    )


def test_modules_of_arrays_may_come_with_text():
    def step(model, batch):
        return jax.tree.map(lambda p: p * 0.5, model), {"loss": jnp.mean(jax.vmap(model)(batch["x"])), "kind": "linear"}

    def model():
        return eqx.nn.Linear(16, 4, key=jax.random.key(0))

    ours = autopar.parallelize(step, method=PLAIN)(model(), batches()[0])
    check(ours, eqx.filter_jit(step)(model(), batches()[0]))
