"""Time of one decode step on one device: under an inference plan and under plain `jax.jit`, alternating in one run.

    python benchmarks/decode.py [--rounds 40]

Prints both median times and their ratio, for several widths. Both donate the cache.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import autopar

LAYERS, HEADS, CONTEXT, TEXTS, STEPS = 4, 8, 128, 8, 20


def make_params(width: int) -> dict:
    """A decoder's weights, a list of layers."""
    keys = iter(jax.random.split(jax.random.key(0), 1 + 4 * LAYERS))

    def dense(rows: int, columns: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns)) * rows**-0.5

    names = {"qkv": (width, 3 * width), "proj": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    layers = [{name: dense(*shape) for name, shape in names.items()} for _ in range(LAYERS)]
    return {"embed": dense(256, width), "layers": layers}


def empty_cache(width: int) -> list[dict]:
    """Keys and values of no tokens."""
    shape = TEXTS, CONTEXT, HEADS, width // HEADS
    return [{"keys": jnp.zeros(shape), "values": jnp.zeros(shape)} for _ in range(LAYERS)]


def decode(params, cache, token, position):
    """One token more: the next, and the cache."""
    x, written = params["embed"][token], []
    for layer, old in zip(params["layers"], cache, strict=True):
        q, k, v = (t.reshape(*t.shape[:2], HEADS, -1) for t in jnp.split(x @ layer["qkv"], 3, axis=-1))
        k = jax.lax.dynamic_update_slice_in_dim(old["keys"], k, position, axis=1)
        v = jax.lax.dynamic_update_slice_in_dim(old["values"], v, position, axis=1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(jnp.arange(CONTEXT) <= position, scores, -1e9))
        x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ layer["proj"]
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
        written.append({"keys": k, "values": v})
    return (x @ params["embed"].T).argmax(-1).astype(jnp.int32), written


def measure(width: int, rounds: int) -> tuple[float, float]:
    """Median seconds of one step: plain, autopar."""
    plain = jax.jit(decode, donate_argnums=1)
    cluster = autopar.Cluster.local(jax.devices()[:1])
    ours = autopar.parallelize(decode, cluster=cluster, method=autopar.Inference())
    params, token, position = make_params(width), jnp.zeros((TEXTS, 1), jnp.int32), jnp.int32(CONTEXT // 2)
    caches = {plain: empty_cache(width), ours: empty_cache(width)}
    seconds: dict[object, list[float]] = {plain: [], ours: []}
    for number in range(rounds + 2):
        for step in caches if number % 2 else reversed(caches):
            cache = caches[step]
            started = time.perf_counter()
            for _ in range(STEPS):
                token, cache = step(params, cache, token, position)
            jax.block_until_ready((token, cache))
            if number >= 2:  # the first rounds compile
                seconds[step].append((time.perf_counter() - started) / STEPS)
            caches[step] = cache
            token = jnp.zeros_like(np.asarray(token))
    return statistics.median(seconds[plain]), statistics.median(seconds[ours])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    table = Table(title=f"one device, {platform.machine()}, {os.cpu_count()} cores, JAX {jax.__version__}")
    for heading in ("width", "jax.jit", "autopar", "ratio"):
        table.add_column(heading, justify="right")
    for width in (64, 256, 512):
        plain, ours = measure(width, rounds)
        table.add_row(str(width), f"{plain * 1e6:.0f} us", f"{ours * 1e6:.0f} us", f"{ours / plain:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
