"""Classify scikit-learn's handwritten digits with a Haiku network, over 8 virtual CPU devices.

    python examples/haiku_mlp.py

The step is that of Haiku's own MNIST example: SGD, with a moving average of the parameters.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"  # before JAX: it reads these once
os.environ["PJRT_NPROC"] = "32"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import autopar

batch_size, learning_rate = 128, 3e-3
num_steps = 100
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=num_steps)
num_steps = parser.parse_args().steps

digits = load_digits()
images = (digits.images / 16).astype(np.float32)  # [1797, 8, 8]
labels = digits.target.astype(np.int32)
order = np.random.default_rng(0).permutation(len(labels))
train_rows, test_rows = order[:-256], order[-256:]


class TrainingState(NamedTuple):
    params: hk.Params
    avg_params: hk.Params
    opt_state: optax.OptState


def net_fn(images):
    return hk.Sequential([hk.Flatten(), hk.nets.MLP([300, 100, 10])])(images)


network = hk.without_apply_rng(hk.transform(net_fn))
optimiser = optax.adam(learning_rate)


def loss_fn(params, batch):
    logits = network.apply(params, batch["image"])
    l2_regulariser = 0.5 * sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    return cross_entropy + 1e-4 * l2_regulariser


@autopar.parallelize  # was: @jax.jit
def update(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    updates, opt_state = optimiser.update(grads, state.opt_state)
    params = optax.apply_updates(state.params, updates)
    avg_params = optax.incremental_update(params, state.avg_params, step_size=0.05)
    return TrainingState(params, avg_params, opt_state), loss


params = network.init(jax.random.key(0), images[:1])
state = TrainingState(params, params, optimiser.init(params))
rng = np.random.default_rng(1)
for i in range(num_steps):
    rows = rng.choice(train_rows, batch_size, replace=False)
    batch = {"image": images[rows], "label": labels[rows]}
    if i == 0:
        print(update.plan(state, batch))
    state, loss = update(state, batch)
    if i % 10 == 0 or i == num_steps - 1:
        print(f"step {i:4d}  loss {loss:.4f}")


def accuracy_of(params, batch):
    return jnp.mean(jnp.argmax(network.apply(params, batch["image"]), axis=-1) == batch["label"])


evaluate = autopar.follow(accuracy_of, update)  # the average is evaluated where it lies
accuracy = evaluate(state.avg_params, {"image": images[test_rows], "label": labels[test_rows]})
print(f"accuracy on {len(test_rows)} images not trained on: {accuracy:.3f}")
