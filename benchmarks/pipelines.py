"""Whether a fixed pipeline is ever predicted to be faster than the automatic plan.

    python benchmarks/pipelines.py [--cluster "2x4 v100"] [--layers 12] [--models gpt]

Plans a GPT (and, if asked, others) on a described cluster: once automatically, then with every combination of data,
tensor and pipeline degrees, and data parallel with each ZeRO stage. All are put on the same clock by the same cost
model and simulator. Prints each one's predicted step time over the automatic plan's.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from gpt import Config, make_step
from rich.console import Console
from rich.table import Table

import autopar


def fixed_methods(num_devices: int):
    """Every `ThreeD`, and data parallelism of each ZeRO stage."""
    degrees = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    for data, tensor, pipeline in itertools.product(degrees, repeat=3):
        if data * tensor * pipeline == num_devices:
            text = f"ThreeD(data={data}, tensor={tensor}, pipeline={pipeline})"
            yield text, autopar.ThreeD(data=data, tensor=tensor, pipeline=pipeline)
    for zero in (0, 1, 3):
        yield f"DataParallel(zero={zero})", autopar.DataParallel(zero=zero)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cluster", default="2x4 v100")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--scanned", action="store_true")
    chosen = parser.parse_args()
    cluster = autopar.Cluster.of(chosen.cluster)
    config = Config(layers=chosen.layers, width=chosen.width, heads=16, batch=chosen.batch, scanned=chosen.scanned)
    step, state, batch = make_step(config)

    def plan(method: autopar.Plan) -> autopar.Plan:
        return autopar.parallelize(step, cluster=cluster, method=method).plan(state, batch)

    started = time.perf_counter()
    best = plan(autopar.Auto())
    console = Console(width=120)
    console.print(f"planned automatically in {time.perf_counter() - started:.0f} s")
    console.print(str(best).split("\n\nArguments")[0])
    table = Table(title=f"GPT, {chosen.layers} layers x {chosen.width}, batch {chosen.batch}, on {chosen.cluster}")
    for heading in ("method", "step", "over automatic"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    automatic = best.cost.step_seconds
    table.add_row("Auto()", f"{automatic * 1e3:.1f} ms", "1.000")
    for text, method in fixed_methods(cluster.num_devices):
        try:
            seconds = plan(method).cost.step_seconds
            table.add_row(text, f"{seconds * 1e3:.1f} ms", f"{seconds / automatic:.3f}")
        except autopar.errors.AutoparError as error:
            table.add_row(text, error.summary, "")
    console.print(table)


if __name__ == "__main__":
    main()
