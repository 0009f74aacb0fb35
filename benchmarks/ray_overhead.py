"""Overhead of Ray: steps of tiny stages on Ray and in this process, an empty call to all workers, copies per byte sent.

    python benchmarks/ray_overhead.py

4 stages of one virtual CPU device each, on Ray one process per stage, all on this machine. The model is so small that
only the drivers, the calls and the messages count. At last a wide model, for the number of copies per byte sent.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"  # before JAX: it reads these once
os.environ["PJRT_NPROC"] = "32"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import platform
import statistics
import time
from collections.abc import Callable

import jax
import ray
from mlp import make_step
from rich.console import Console
from rich.table import Table

import autopar

STAGES, STEPS = 4, 30


def median(run: Callable[[], object], times: int = STEPS) -> float:
    """Median seconds of a call, the first few left out."""
    found = []
    for _ in range(times):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return statistics.median(found[times // 5 :])


def measure(cluster: autopar.Cluster, width: int, batch_size: int, num_microbatches: int):
    """Compiled step, and seconds of one."""
    train_step, params, batch = make_step(width, STAGES, batch_size)
    method = autopar.PipelineParallel(num_stages=STAGES, num_microbatches=num_microbatches)
    compiled = autopar.parallelize(train_step, cluster=cluster, method=method).compile(params, batch)
    state = [params]

    def run():
        state[0], loss = compiled(state[0], batch)
        jax.block_until_ready((state[0], loss))

    return compiled, median(run)


def main() -> None:
    """Print the table."""
    ray.init("local", num_cpus=1, include_dashboard=False, object_store_memory=500 * 2**20, log_to_driver=False)
    here, there = autopar.Cluster.local(), autopar.Cluster.ray(devices_per_host=STAGES)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, JAX {jax.__version__}, Ray {ray.__version__}"
    table = Table(title=f"{STAGES} stages, {machine}")
    for heading in ("MLP", "microbatches", "messages", "this process", "Ray", "difference", "per message", "ratio"):
        table.add_column(heading, justify="right")
    for width, batch_size, count in ((16, 32, 1), (16, 32, 16), (512, 4096, 16)):
        _, local = measure(here, width, batch_size, count)
        compiled, remote = measure(there, width, batch_size, count)
        messages = sum(type(i).__name__ == "Send" for s in compiled.plan.streams.values() for i in s)
        table.add_row(
            f"{STAGES} x {width}, batch {batch_size}",
            str(count),
            str(messages),
            f"{local * 1e3:.1f} ms",
            f"{remote * 1e3:.1f} ms",
            f"{(remote - local) * 1e3:.1f} ms",
            f"{(remote - local) / messages * 1e3:.2f} ms",
            f"{remote / local:.2f}",
        )
    console = Console(width=110)
    console.print(table)
    workers = compiled.executable.workers
    everyone = {seat.number: () for seat in workers.seats}
    console.print(f"empty call of {STAGES} workers: {median(lambda: workers.call('pid', everyone)) * 1e3:.2f} ms")
    counts = workers.call("counts", everyone).values()
    sent, copied = (sum(c[key] for c in counts) for key in ("sent_bytes", "copied_bytes"))
    console.print(f"sent between workers: {sent / 1e6:.0f} MB, each byte copied {copied / sent:.2f} times")
    there.machine.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
