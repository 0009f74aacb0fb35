"""Classify scikit-learn's digits with an Equinox vision transformer, over 8 virtual CPU devices.

    python examples/equinox_vit.py

The step is written as for `eqx.filter_jit`: it takes and returns a model of arrays and functions.
The sequence has 16 patches and one class token. No mesh axis divides this length of 17, and that is no problem.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"  # before JAX: it reads these once
os.environ["PJRT_NPROC"] = "32"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import autopar

num_layers, num_heads, width, patch = 2, 4, 64, 2
batch_size, learning_rate = 128, 2e-3
num_steps = 100
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=num_steps)
num_steps = parser.parse_args().steps

digits = load_digits()
images = (digits.images / 16).astype(np.float32)  # [1797, 8, 8]
labels = digits.target.astype(np.int32)
order = np.random.default_rng(0).permutation(len(labels))
train_rows, test_rows = order[:-256], order[-256:]
num_patches = (images.shape[1] // patch) ** 2


class Block(eqx.Module):
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(num_heads, width, key=keys[0])
        self.up = eqx.nn.Linear(width, 4 * width, key=keys[1])
        self.down = eqx.nn.Linear(4 * width, width, key=keys[2])

    def __call__(self, x):
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(lambda token: self.down(jax.nn.gelu(self.up(self.norm2(token)))))(x)


class VisionTransformer(eqx.Module):
    embed: eqx.nn.Linear
    class_token: jax.Array
    positions: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4 + num_layers)
        self.embed = eqx.nn.Linear(patch * patch, width, key=keys[0])
        self.class_token = jax.random.normal(keys[1], (1, width)) * 0.02
        self.positions = jax.random.normal(keys[2], (num_patches + 1, width)) * 0.5
        self.blocks = [Block(key) for key in keys[4:]]
        self.norm, self.head = eqx.nn.LayerNorm(width), eqx.nn.Linear(width, 10, key=keys[3])

    def __call__(self, image):
        side = image.shape[0] // patch
        patches = image.reshape(side, patch, side, patch).transpose(0, 2, 1, 3).reshape(num_patches, -1)
        x = jnp.concatenate([self.class_token, jax.vmap(self.embed)(patches)]) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[0]))


optimizer = optax.adamw(learning_rate)


@eqx.filter_value_and_grad(has_aux=True)
def loss_fn(model, batch):
    logits = jax.vmap(model)(batch["image"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    return loss, jnp.mean(jnp.argmax(logits, -1) == batch["label"])


@autopar.parallelize  # was: @eqx.filter_jit
def train_step(model, opt_state, batch):
    (loss, accuracy), grads = loss_fn(model, batch)
    updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), opt_state, {"loss": loss, "accuracy": accuracy}


model = VisionTransformer(jax.random.key(0))
opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
rng = np.random.default_rng(1)
for i in range(num_steps):
    rows = rng.choice(train_rows, batch_size, replace=False)
    batch = {"image": images[rows], "label": labels[rows]}
    if i == 0:
        print(train_step.plan(model, opt_state, batch))
    model, opt_state, metrics = train_step(model, opt_state, batch)
    if i % 10 == 0 or i == num_steps - 1:
        print(f"step {i:4d}  loss {metrics['loss']:.4f}  accuracy {metrics['accuracy']:.3f}")


evaluate = autopar.follow(lambda model, batch: loss_fn(model, batch)[0][1], train_step)
accuracy = evaluate(model, {"image": images[test_rows], "label": labels[test_rows]})
print(f"accuracy on {len(test_rows)} images not trained on: {accuracy:.3f}")
