"""Classify scikit-learn's handwritten digits with a Flax linen conv net, BatchNorm and all, over 8 virtual CPU devices.

    python examples/digits_cnn.py

The BatchNorm statistics are those of the whole batch, as on one device, however the batch is split.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"  # before JAX: it reads these once
os.environ["PJRT_NPROC"] = "32"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state
from sklearn.datasets import load_digits

import autopar

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


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        for channels in (32, 64):
            x = nn.Conv(channels, (3, 3), use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
        x = x.reshape(len(x), -1)
        return nn.Dense(10)(nn.relu(nn.Dense(128)(x)))


class TrainState(train_state.TrainState):
    batch_stats: Any


model = ConvNet()


def init_state():
    variables = model.init(jax.random.key(0), images[:1], train=False)
    return TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=optax.adamw(learning_rate),
        batch_stats=variables["batch_stats"],
    )


@autopar.parallelize
def train_step(state, batch):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, changed = state.apply_fn(variables, batch["image"], train=True, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        return loss, (logits, changed["batch_stats"])

    (loss, (logits, batch_stats)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), {"loss": loss, "accuracy": accuracy}


state = init_state()
rng = np.random.default_rng(1)
for i in range(num_steps):
    rows = rng.choice(train_rows, batch_size, replace=False)
    batch = {"image": images[rows], "label": labels[rows]}
    if i == 0:
        print(train_step.plan(state, batch))
    state, metrics = train_step(state, batch)
    if i % 10 == 0 or i == num_steps - 1:
        print(f"step {i:4d}  loss {metrics['loss']:.4f}  accuracy {metrics['accuracy']:.3f}")

variables = jax.device_get({"params": state.params, "batch_stats": state.batch_stats})
logits = model.apply(variables, images[test_rows], train=False)
print(f"accuracy on {len(test_rows)} images not trained on: {np.mean(np.argmax(logits, -1) == labels[test_rows]):.3f}")
