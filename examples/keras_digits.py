"""Classify scikit-learn's handwritten digits with a Keras model, over 8 virtual CPU devices.

    python examples/keras_digits.py

Trains first with the step of Keras' guide to training loops in JAX, then with `model.fit`. Keras must run on JAX.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"  # before JAX: it reads these once
os.environ["PJRT_NPROC"] = "32"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["KERAS_BACKEND"] = "jax"  # before Keras, likewise

import argparse

import jax
import keras
import numpy as np
from sklearn.datasets import load_digits

import autopar
from autopar.adapters.keras import distribute

batch_size, learning_rate = 128, 2e-3
num_steps = 100
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=num_steps)
num_steps = parser.parse_args().steps

digits = load_digits()
images = (digits.images[..., None] / 16).astype(np.float32)  # [1797, 8, 8, 1]
labels = digits.target.astype(np.int32)
order = np.random.default_rng(0).permutation(len(labels))
train_rows, test_rows = order[:-256], order[-256:]


def make_model():
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input(images.shape[1:]),
            layers.Conv2D(32, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


model = make_model()
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.Adam(learning_rate)
optimizer.build(model.trainable_variables)


def compute_loss_and_updates(trainable_variables, non_trainable_variables, x, y):
    y_pred, non_trainable_variables = model.stateless_call(
        trainable_variables, non_trainable_variables, x, training=True
    )
    return loss_fn(y, y_pred), non_trainable_variables


grad_fn = jax.value_and_grad(compute_loss_and_updates, has_aux=True)


@autopar.parallelize  # was: @jax.jit
def train_step(state, data):
    trainable_variables, non_trainable_variables, optimizer_variables = state
    x, y = data
    (loss, non_trainable_variables), grads = grad_fn(trainable_variables, non_trainable_variables, x, y)
    trainable_variables, optimizer_variables = optimizer.stateless_apply(
        optimizer_variables, grads, trainable_variables
    )
    return loss, (trainable_variables, non_trainable_variables, optimizer_variables)


state = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
state = jax.tree.map(lambda variable: variable.value, state)
rng = np.random.default_rng(1)
for i in range(num_steps):
    rows = rng.choice(train_rows, batch_size, replace=False)
    data = (images[rows], labels[rows])
    if i == 0:
        print(train_step.plan(state, data))
    loss, state = train_step(state, data)
    if i % 10 == 0 or i == num_steps - 1:
        print(f"step {i:4d}  loss {loss:.4f}")

# --- the same with Keras' own loop: one line after `compile` ---------------------------------------------------------
model = make_model()
model.compile(keras.optimizers.Adam(learning_rate), loss_fn, metrics=["accuracy"])
distribute(model)
model.fit(images[train_rows[:1408]], labels[train_rows[:1408]], batch_size=batch_size, epochs=3, verbose=0)
_, accuracy = model.evaluate(images[test_rows], labels[test_rows], batch_size=batch_size, verbose=0)
print(f"accuracy on {len(test_rows)} images not trained on: {accuracy:.3f}")
