"""Overhead of the driver of a pipeline: time per instruction of a tiny model, and whole steps against their programs.

    python benchmarks/pipeline_overhead.py

4 stages x 16 microbatches on 4 virtual CPU devices. First a model so small that only the driver counts: its time per
instruction. Then a model whose stages take 10 ms and more: the time of the whole step over the summed times of its programs,
each run by itself. The devices share the machine's cores, so the ratio is 1 if the driver adds nothing and no two programs
of a step fill each other's gaps.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"  # before JAX: it reads these once
os.environ["PJRT_NPROC"] = "32"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import platform
import statistics
import time

import jax
from mlp import make_step
from rich.console import Console
from rich.table import Table

import autopar

STAGES, MICROBATCHES = 4, 16


def measure(width: int, layers: int, batch_size: int, steps: int) -> tuple[int, float, float, float]:
    """Instructions; median seconds of a step, of its dispatch alone, and of all its programs run one by one."""
    train_step, params, batch = make_step(width, layers, batch_size)
    method = autopar.PipelineParallel(num_stages=STAGES, num_microbatches=MICROBATCHES)
    compiled = autopar.parallelize(train_step, method=method).compile(params, batch)
    state, whole, driver, alone = params, [], [], []
    for _ in range(steps):
        started = time.perf_counter()
        state, loss = compiled(state, batch)
        driver.append(time.perf_counter() - started)
        jax.block_until_ready((state, loss))
        whole.append(time.perf_counter() - started)
        (state, loss), timeline = compiled.measure(state, batch, steps=1)
        alone.append(sum(e.end - e.start for e in timeline.events if e.kind != "transfer"))
    instructions = sum(map(len, compiled.plan.streams.values()))
    return instructions, *(statistics.median(times[2:]) for times in (whole, driver, alone))


def main() -> None:
    """Print the table."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores, JAX {jax.__version__}"
    table = Table(title=f"{STAGES} stages x {MICROBATCHES} microbatches, {machine}")
    for heading in ("MLP", "instructions", "driver, each", "step", "its programs alone", "ratio"):
        table.add_column(heading, justify="right")
    for width, layers, batch_size, steps in ((16, 4, 32, 40), (1024, 8, 4096, 6)):
        instructions, whole, driver, alone = measure(width, layers, batch_size, steps)
        table.add_row(
            f"{layers} x {width}, batch {batch_size}",
            str(instructions),
            f"{driver / instructions * 1e3:.3f} ms",
            f"{whole * 1e3:.1f} ms",
            f"{alone * 1e3:.1f} ms",
            f"{whole / alone:.3f}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
