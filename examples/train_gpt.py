"""Train a byte-level GPT on this machine's own Python sources, sharded by one line over 8 virtual CPU devices.

    python examples/train_gpt.py            (or: make demo)

Prints the plan and draws it in train_gpt.html. Trains three times, with a live loss: sharded, as a pipeline of 4 stages (it
prints the timetable), and with plain `jax.jit` on one device. Draws the three losses, which are equal, in train_gpt.png.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"  # before JAX: it reads these once
os.environ["PJRT_NPROC"] = "32"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeElapsedColumn

import autopar

num_layers, num_heads, width = 3, 4, 96
context, batch_size = 64, 16
num_steps = 200
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=num_steps)
num_steps = parser.parse_args().steps
console = Console()

# --- data: the standard library's sources, as bytes ------------------------------------------------------------------
sources = sorted(Path(os.__file__).parent.glob("*.py"))
text = np.frombuffer(b"".join(source.read_bytes() for source in sources), np.uint8)


def next_batch(rng):
    starts = rng.integers(0, len(text) - context - 1, batch_size)
    windows = text[starts[:, None] + np.arange(context + 1)].astype(np.int32)
    return {"tokens": windows[:, :-1], "targets": windows[:, 1:]}


# --- model: a plain GPT, its parameters in dicts ---------------------------------------------------------------------
def init_params(key):
    keys = iter(jax.random.split(key, 2 + 4 * num_layers))

    def dense(rows, columns):
        return jax.random.normal(next(keys), (rows, columns)) * rows**-0.5

    return {
        "embed": dense(256, width),
        "position": dense(context, width) * 0.1,
        "layers": [
            {
                "norm1": jnp.ones(width),
                "qkv": dense(width, 3 * width),
                "proj": dense(width, width),
                "norm2": jnp.ones(width),
                "up": dense(width, 4 * width),
                "down": dense(4 * width, width),
            }
            for _ in range(num_layers)
        ],
        "norm": jnp.ones(width),
    }


def rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def attention(x, layer):
    q, k, v = (t.reshape(*t.shape[:2], num_heads, -1) for t in jnp.split(x @ layer["qkv"], 3, axis=-1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones((context, context), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ layer["proj"]


def loss_fn(params, batch):
    x = params["embed"][batch["tokens"]] + params["position"]
    for layer in params["layers"]:
        x = x + attention(rms_norm(x, layer["norm1"]), layer)
        x = x + jax.nn.gelu(rms_norm(x, layer["norm2"]) @ layer["up"]) @ layer["down"]
    logits = rms_norm(x, params["norm"]) @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


# --- the step: written for one device, parallel by its first line ----------------------------------------------------
learning_rate = optax.warmup_cosine_decay_schedule(0.0, 3e-3, num_steps // 5, num_steps)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(learning_rate))


def step_on_one_device(state, batch):
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


@autopar.parallelize
def train_step(state, batch):
    return step_on_one_device(state, batch)


@autopar.parallelize(method=autopar.PipelineParallel(num_stages=4, num_microbatches=4))
def pipelined_step(state, batch):
    return step_on_one_device(state, batch)


def init_state():
    params = init_params(jax.random.key(0))
    return params, optimizer.init(params)


def train(step, title):
    state, rng, losses = init_state(), np.random.default_rng(0), []
    columns = "{task.description:24}", BarColumn(), "step {task.completed}", "loss {task.fields[loss]:.4f}"
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        bar = progress.add_task(title, total=num_steps, loss=float("nan"))
        for _ in range(num_steps):
            state, loss = step(state, next_batch(rng))
            losses.append(float(loss))
            progress.update(bar, advance=1, loss=losses[-1])
    return losses


arguments = init_state(), next_batch(np.random.default_rng(0))
with console.status("planning ..."):
    plan, stages = train_step.plan(*arguments), pipelined_step.plan(*arguments)
print(f"{plan}\n\nThe same in pictures: {autopar.show(plan, path='train_gpt.html')}\n")
parallel = train(train_step, f"{len(jax.devices())} devices, autopar")
print(f"A pipeline of {len(stages.stages)} stages: F forward, B backward, U update, by microbatch\n{stages.timeline()}")
pipelined = train(pipelined_step, f"{len(stages.stages)} stages, autopar")
single = train(jax.jit(step_on_one_device), "one device, jax.jit")

# --- both curves -----------------------------------------------------------------------------------------------------
plt.plot(single, linewidth=5, alpha=0.4, label="jax.jit, one device")
plt.plot(parallel, linewidth=1.5, label=f"autopar, {len(jax.devices())} devices")
plt.plot(pipelined, linewidth=1.5, linestyle=":", label=f"autopar, {len(stages.stages)} stages")
plt.xlabel("step"), plt.ylabel("loss (nats per byte)"), plt.legend()
plt.savefig("train_gpt.png", dpi=150)
difference = max(np.max(np.abs(np.subtract(losses, single))) for losses in (parallel, pipelined))
assert difference < 1e-4, f"the losses differ by {difference}"
print(f"loss {single[0]:.3f} -> {single[-1]:.3f}; the runs differ by at most {difference:.1e}; see train_gpt.png")
