"""Checkpoints on Ray: written and read by the workers themselves, and through the memory of the driver.

    python benchmarks/ray_checkpoint.py [MiB of state]

2 stages of two virtual CPU devices each, all on this machine with one disk: the gain on a cluster, where each node has its own
network link, does not show. State goes through the driver if the workers do not see the directory.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"  # before JAX: it reads these once
os.environ["PJRT_NPROC"] = "32"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import ray
from mlp import make_step
from rich.console import Console
from rich.table import Table

import autopar
from autopar import checkpoint
from autopar.runtime.ray.driver.workers import Workers

STAGES, TIMES = 2, 5
WAYS = {"by workers": Workers.unseen, "through the driver": lambda _, workers, *asked: dict.fromkeys(workers, "unseen")}
PARTS = ("save returns", "save is done", "restored, and stepped")


def main(mebibytes: int) -> None:
    """Print the table."""
    ray.init("local", num_cpus=1, include_dashboard=False, object_store_memory=2**31, log_to_driver=False)
    width = int((mebibytes * 2**20 / 4 / STAGES) ** 0.5)
    train_step, params, batch = make_step(width, STAGES, 4)
    cluster = autopar.Cluster.ray(hosts=1, devices_per_host=2 * STAGES)
    step = autopar.parallelize(
        train_step, cluster=cluster, method=autopar.PipelineParallel(num_stages=STAGES, num_microbatches=1)
    )
    state, _ = step(params, batch)
    found: dict[str, list[tuple[float, ...]]] = {way: [] for way in WAYS}
    for _ in range(TIMES + 1):
        for way, unseen in WAYS.items():
            Workers.unseen = unseen  # type: ignore[method-assign]
            found[way].append(measure(step, state, batch))
    seconds = {way: [statistics.median(part) for part in zip(*own[1:], strict=True)] for way, own in found.items()}
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / 2**20
    title = f"{size:.0f} MiB of state, median of {TIMES}; jax {jax.__version__}, {os.cpu_count()} cores, {platform.machine()}"
    table = Table("", *(f"{way}, s" for way in WAYS), "ratio", title=title)
    for k, part in enumerate(PARTS):
        mine, others = (seconds[way][k] for way in WAYS)
        table.add_row(part, f"{mine:.2f}", f"{others:.2f}", f"{mine / others:.2f}")
    Console().print(table)
    cluster.machine.close()
    ray.shutdown()


def measure(step: Callable[..., Any], state: Any, batch: Any) -> tuple[float, ...]:
    """Seconds of each part."""
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    with tempfile.TemporaryDirectory() as directory:
        begun = time.perf_counter()
        saving = checkpoint.save(directory, state, 1)
        returned = time.perf_counter()
        saving.wait()
        done = time.perf_counter()
        restored = checkpoint.restore(directory, like, compiled=step)
        np.asarray(step(restored, batch)[1])
        return returned - begun, done - begun, time.perf_counter() - done


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="a checkpoint goes through")
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 512)
