"""Whether a plan fixed by hand is ever predicted to be faster than the automatic one.

    python benchmarks/pipelines.py [--cluster "2x4 v100"] [--model gpt] [--layers 12]

Plans a model on a described cluster: once automatically, then with every combination of data, tensor and pipeline degrees,
with stages of equal work whose sharding is searched, and data parallel with each ZeRO stage. All are predicted by the same
cost model and simulator. Prints the time that planning took, and the predicted step time of each plan over that of the
automatic plan. Wide-ResNet normalizes over each microbatch: if it normalized over the batch, it could have none.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import gpt
import wide_resnet
from rich.console import Console

import autopar


def fixed_methods(num_devices: int, semantics: str):
    """Every `ThreeD`, equal stages, and data parallelism of each ZeRO stage, by name."""
    degrees = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    for data, tensor, pipeline in itertools.product(degrees, repeat=3):
        if data * tensor * pipeline == num_devices:
            sizes = {"data": data, "tensor": tensor, "pipeline": pipeline}
            yield _text("ThreeD", sizes), autopar.ThreeD(**sizes, microbatch_semantics=semantics)
    for num_stages in degrees[1:]:
        method = autopar.PipelineParallel(num_stages=num_stages, microbatch_semantics=semantics)
        yield _text("PipelineParallel", {"num_stages": num_stages}), method
    for zero in (0, 1, 2, 3):
        yield _text("DataParallel", {"zero": zero}), autopar.DataParallel(zero=zero)


def _text(name: str, arguments: dict[str, int]) -> str:
    return f"{name}({', '.join(f'{key}={value}' for key, value in arguments.items())})"


def make_model(chosen: argparse.Namespace):
    """The step, its state and batch."""
    if chosen.model == "wide-resnet":
        return wide_resnet.make_step(wide_resnet.Config(batch=chosen.batch))
    experts = 16 if chosen.model == "moe" else 0
    sizes = {"layers": chosen.layers, "width": chosen.width, "heads": 16, "batch": chosen.batch}
    return gpt.make_step(gpt.Config(**sizes, scanned=chosen.scanned, experts=experts))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cluster", default="2x4 v100")
    parser.add_argument("--model", default="gpt", choices=("gpt", "moe", "wide-resnet"))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--scanned", action="store_true")
    parser.add_argument("--only-automatic", action="store_true")
    chosen = parser.parse_args()
    cluster = autopar.Cluster.of(chosen.cluster)
    step, state, batch = make_model(chosen)
    semantics = "per_microbatch" if chosen.model == "wide-resnet" else "exact"

    def plan(method) -> autopar.Plan:
        return autopar.parallelize(step, cluster=cluster, method=method).plan(state, batch)

    started = time.perf_counter()
    best = plan(autopar.Auto(microbatch_semantics=semantics))
    console = Console(width=120)
    console.print(f"planned automatically in {time.perf_counter() - started:.0f} s")
    console.print(str(best).split("\n\nArguments")[0])
    if chosen.only_automatic:
        return
    automatic = best.cost.step_seconds
    console.print(f"[bold]{chosen.model}, batch {chosen.batch}, on {chosen.cluster}: step, and over the automatic one")
    least = math.inf
    for text, method in fixed_methods(cluster.num_devices, semantics):
        try:
            ratio = plan(method).cost.step_seconds / automatic
        except autopar.errors.AutoparError as error:
            console.print(f"  {text:40} {error.summary}")
            continue
        least = min(least, ratio)
        console.print(f"  {text:40} {ratio * automatic * 1e3:10.1f} ms {ratio:8.3f}")
    console.print(f"least of all that fit: {least:.3f}")


if __name__ == "__main__":
    main()
