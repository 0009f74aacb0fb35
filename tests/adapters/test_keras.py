"""Keras 3 on JAX: its own loop, on many devices, and its stateless functions."""

from __future__ import annotations

import os

import jax
import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras", reason="Keras is not installed: pip install keras")
if keras.backend.backend() != "jax":
    pytest.skip("Keras runs on another backend than JAX", allow_module_level=True)

import autopar  # noqa: E402
from autopar.adapters.keras import distribute  # noqa: E402
from autopar.errors import AutoparError  # noqa: E402
from tests.adapters.test_nnx import METHODS, batches  # noqa: E402


def make():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(16, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.1)]
    model = keras.Sequential([keras.layers.Input((16,)), *layers, keras.layers.Dense(16)])
    model.compile(keras.optimizers.Adam(1e-2, epsilon=1e-3), "mse", metrics=["mae"])
    return model


def data():
    return tuple(np.concatenate([batch[name] for batch in batches()]) for name in "xy")


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_fit(method):
    ours, theirs = make(), make()
    step = distribute(ours, method=method)
    options = {"epochs": 1, "batch_size": 16, "shuffle": False, "verbose": 0}
    got, expected = (model.fit(*data(), **options).history for model in (ours, theirs))
    assert got.keys() == expected.keys()
    for name in got:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-4)
    for a, b in zip(ours.variables, theirs.variables, strict=True):
        np.testing.assert_allclose(np.asarray(a.value), np.asarray(b.value), rtol=1e-3, atol=1e-5)
    assert len(step._made.compiled) == 1
    names = {value.name for value in step.latest().plan.values}
    assert {f"state/trainable/{v.path}" for v in ours.trainable_variables} <= names
    measured = [model.evaluate(*data(), batch_size=16, verbose=0) for model in (ours, theirs)]
    np.testing.assert_allclose(*measured, rtol=1e-4)
    predicted = [model.predict(data()[0][:32], batch_size=16, verbose=0) for model in (ours, theirs)]
    np.testing.assert_allclose(*predicted, rtol=1e-3, atol=1e-4)


def test_before_anything_is_trained():
    ours, theirs = make(), make()
    distribute(ours)
    for ask in ("evaluate", "predict"):
        given = data() if ask == "evaluate" else data()[:1]
        got = [getattr(model, ask)(*given, batch_size=16, verbose=0) for model in (ours, theirs)]
        np.testing.assert_allclose(*got, rtol=1e-4)


def test_a_model_without_a_step():
    model = keras.Sequential([keras.layers.Dense(4)])
    with pytest.raises(AutoparError, match="(?s)no training step to distribute.*model.compile"):
        distribute(model)


def test_the_stateless_loop():
    """As in Keras' guide to writing a loop in JAX."""
    model = make()
    optimizer, loss_fn = model.optimizer, keras.losses.MeanSquaredError()
    optimizer.build(model.trainable_variables)

    def compute_loss(trainable, others, batch):
        out, others = model.stateless_call(trainable, others, batch["x"], training=True)
        return loss_fn(batch["y"], out), others

    def step(state, batch):
        trainable, others, slots = state
        (loss, others), grads = jax.value_and_grad(compute_loss, has_aux=True)(trainable, others, batch)
        trainable, slots = optimizer.stateless_apply(slots, grads, trainable)
        return (trainable, others, slots), loss

    groups = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    got = expected = tuple([np.asarray(v.value) for v in group] for group in groups)
    ours, jitted = autopar.parallelize(step, method=METHODS["zero 3"]), jax.jit(step)
    for batch in batches():
        (got, loss), (expected, other) = ours(got, batch), jitted(expected, batch)
        np.testing.assert_allclose(loss, other, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)
