"""Teach a Flax NNX encoder to reverse a sequence of digits, over 8 virtual CPU devices.

    python examples/flax_nnx_transformer.py

The step is written as for `nnx.jit`: it takes model, optimizer and metrics, and updates them in place.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"  # before JAX: it reads these once
os.environ["PJRT_NPROC"] = "32"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import autopar

num_layers, num_heads, width, vocabulary = 2, 4, 64, 10
sequence_length, batch_size, learning_rate = 12, 128, 3e-3
num_steps = 100
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=num_steps)
num_steps = parser.parse_args().steps


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.tokens = nnx.Embed(vocabulary, width, rngs=rngs)
        self.positions = nnx.Embed(sequence_length, width, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(num_layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocabulary, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions(jnp.arange(sequence_length))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(model, batch):
    logits = model(batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean(), logits


@autopar.parallelize  # was: @nnx.jit
def train_step(model, optimizer, metrics, batch):
    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["targets"])
    optimizer.update(model, grads)


model = Transformer(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(learning_rate), wrt=nnx.Param)
metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())

rng = np.random.default_rng(0)
for i in range(num_steps):
    tokens = rng.integers(0, vocabulary, (batch_size, sequence_length), dtype=np.int32)
    batch = {"tokens": tokens, "targets": tokens[:, ::-1].copy()}
    if i == 0:
        print(train_step.plan(model, optimizer, metrics, batch))
    train_step(model, optimizer, metrics, batch)
    if i % 10 == 0 or i == num_steps - 1:
        means = metrics.compute()
        print(f"step {i:4d}  loss {means['loss']:.4f}  accuracy {means['accuracy']:.3f}")
        metrics.reset()
