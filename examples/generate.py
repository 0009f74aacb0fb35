"""Train a small GPT, save it, and let it write: prefill and decode under a plan for inference, over 8 virtual CPU devices.

    python examples/generate.py

The checkpoint of the training run is read directly into the shardings of the inference plan. Prints what the model writes,
which equals, token by token, what it writes on one device.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"  # before JAX: it reads these once
os.environ["PJRT_NPROC"] = "32"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar

num_layers, num_heads, width, context = 3, 4, 96, 96
batch_size, num_prompts, prompt_length = 16, 8, 32
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
num_steps, num_tokens = parser.parse_args().steps, 48

# --- data: the standard library's sources, as bytes ------------------------------------------------------------------
sources = sorted(Path(os.__file__).parent.glob("*.py"))
text = np.frombuffer(b"".join(source.read_bytes() for source in sources), np.uint8)


def windows(rng, count, length):
    starts = rng.integers(0, len(text) - length, count)
    return text[starts[:, None] + np.arange(length)].astype(np.int32)


# --- model: tokens from position `start` on, read with the keys and values of those before them ----------------------
def init_params(key):
    keys = iter(jax.random.split(key, 2 + 4 * num_layers))
    shapes = {"qkv": (width, 3 * width), "proj": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}

    def dense(rows, columns):
        return jax.random.normal(next(keys), (rows, columns)) * rows**-0.5

    return {
        "embed": dense(256, width),
        "position": dense(context, width) * 0.1,
        "layers": [{name: dense(*shape) for name, shape in shapes.items()} for _ in range(num_layers)],
    }


def empty_cache(count):
    shape = count, context, num_heads, width // num_heads
    return [{"keys": jnp.zeros(shape), "values": jnp.zeros(shape)} for _ in range(num_layers)]


def normalized(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def forward(params, cache, tokens, start):
    length = tokens.shape[1]
    x = params["embed"][tokens] + jax.lax.dynamic_slice_in_dim(params["position"], start, length)
    visible = jnp.arange(context) <= start + jnp.arange(length)[:, None]
    written = []
    for layer, old in zip(params["layers"], cache, strict=True):
        qkv = jnp.split(normalized(x) @ layer["qkv"], 3, axis=-1)
        q, k, v = (t.reshape(*t.shape[:2], num_heads, -1) for t in qkv)
        k = jax.lax.dynamic_update_slice_in_dim(old["keys"], k, start, axis=1)
        v = jax.lax.dynamic_update_slice_in_dim(old["values"], v, start, axis=1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(visible, scores, -1e9), axis=-1)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ layer["proj"]
        x = x + jax.nn.gelu(normalized(x) @ layer["up"]) @ layer["down"]
        written.append({"keys": k, "values": v})
    return normalized(x) @ params["embed"].T, written


# --- training, as ever -----------------------------------------------------------------------------------------------
optimizer = optax.adamw(3e-3)


def loss_fn(params, tokens):
    logits, _ = forward(params, empty_cache(len(tokens)), tokens[:, :-1], 0)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@autopar.parallelize
def train_step(state, tokens):
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


# --- inference: what a decoder repeats is planned; what fills its cache follows it -----------------------------------
def most_likely(logits):
    return logits[:, -1:].argmax(-1).astype(jnp.int32)


def prefill(params, tokens):
    logits, cache = forward(params, empty_cache(len(tokens)), tokens, 0)
    return most_likely(logits), cache


def decode(params, cache, token, position):
    logits, cache = forward(params, cache, token, position)
    return most_likely(logits), cache


parallel_decode = autopar.parallelize(decode, method=autopar.Inference(latency=True))
parallel_prefill = autopar.follow(prefill, parallel_decode)


def generate(prefill, decode, params, prompts):
    token, cache = prefill(params, prompts)
    written = [token]
    for position in range(prompt_length, prompt_length + num_tokens - 1):
        token, cache = decode(params, cache, token, np.int32(position))
        written.append(token)
    return np.concatenate([prompts, *map(np.asarray, written)], axis=1)


rng = np.random.default_rng(0)
params = init_params(jax.random.key(0))
state = params, optimizer.init(params)
for _ in range(num_steps):
    state, loss = train_step(state, windows(rng, batch_size, context))
prompts = windows(rng, num_prompts, prompt_length)
types = jax.eval_shape(init_params, jax.random.key(0))
example = jax.eval_shape(prefill, types, prompts)
with tempfile.TemporaryDirectory() as folder:
    autopar.checkpoint.save(folder, {"params": state[0], "optimizer": state[1]})
    compiled = parallel_decode.compile(types, example[1], example[0], jax.ShapeDtypeStruct((), jnp.int32))
    placed = autopar.checkpoint.restore(folder, {"params": types}, compiled=compiled, partial=True)
    alone = autopar.checkpoint.restore(folder, {"params": types}, partial=True)
print(compiled.plan)
several = generate(parallel_prefill, parallel_decode, placed["params"], prompts)
single = generate(jax.jit(prefill), jax.jit(decode), alone["params"], prompts)
for row in several[:2]:
    print("-" * 80, bytes(row[:prompt_length].tolist()).decode(errors="replace"), sep="\n", end="")
    print(f"\033[1m{bytes(row[prompt_length:].tolist()).decode(errors='replace')}\033[0m")
np.testing.assert_array_equal(several, single)
print(f"loss {float(loss):.3f}; {num_tokens} tokens of {num_prompts} texts, each the same as on one device")
