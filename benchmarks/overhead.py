"""What autopar adds to a step on one device, compared with plain `jax.jit`, alternating in one run.

    python benchmarks/overhead.py [--steps 200]

Prints the median time of each and their ratio. Both run the same step on the same arrays and donate their state; they
take turns in short rounds, so that other load on the machine affects both.
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
import optax
from rich.console import Console
from rich.table import Table

import autopar


def make_step(width: int, layers: int):
    """An MLP with Adam: its state and a batch."""
    optimizer = optax.adam(1e-3)

    def train_step(state, batch):
        def loss_fn(params):
            x = batch["x"]
            for layer in params:
                x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
            return jnp.mean((x - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = optimizer.update(grads, state["opt_state"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss

    def init():
        keys = jax.random.split(jax.random.key(0), layers)
        params = [{"kernel": jax.random.normal(k, (width, width)) / width**0.5, "bias": jnp.zeros(width)} for k in keys]
        return {"params": params, "opt_state": optimizer.init(params)}

    random = np.random.default_rng(0)
    batch = {name: jnp.asarray(random.normal(size=(64, width)), jnp.float32) for name in ("x", "y")}
    return train_step, init, batch


def measure(width: int, layers: int, rounds: int, steps: int) -> tuple[float, float]:
    """Median seconds of one step: plain, autopar."""
    train_step, init, batch = make_step(width, layers)
    plain = jax.jit(train_step, donate_argnums=0)
    ours = autopar.parallelize(train_step, cluster=autopar.Cluster.local(jax.devices()[:1]))
    runs = {plain: init(), ours: init()}
    seconds: dict[object, list[float]] = {plain: [], ours: []}
    for number in range(rounds + 2):
        for step in runs if number % 2 else reversed(runs):
            state = runs[step]
            started = time.perf_counter()
            for _ in range(steps):
                state, loss = step(state, batch)
            jax.block_until_ready((state, loss))
            if number >= 2:  # the first rounds compile
                seconds[step].append((time.perf_counter() - started) / steps)
            runs[step] = state
    return statistics.median(seconds[plain]), statistics.median(seconds[ours])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=40)
    chosen = parser.parse_args()
    table = Table(title=f"one device, {platform.machine()}, {os.cpu_count()} cores, JAX {jax.__version__}")
    for heading in ("MLP", "leaves of state", "jax.jit", "autopar", "ratio"):
        table.add_column(heading, justify="right")
    for width, layers in ((256, 4), (512, 4), (512, 12)):
        plain, ours = measure(width, layers, chosen.rounds, chosen.steps)
        table.add_row(
            f"{layers} x {width}",
            str(6 * layers + 1),
            f"{plain * 1e3:.2f} ms",
            f"{ours * 1e3:.2f} ms",
            f"{ours / plain:.3f}",
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
