"""Plans against XLA's GPU compiler: memory and bytes, predicted and as compiled, for 8 H100 that you need not have.

    pip install 'autopar[verify]'
    python benchmarks/verify.py [verify.json] [--seconds 240] [--models gpt-scan,...] [--methods auto,...] [--target h100]

In:     the models of the benchmarks; the file, with the results of earlier runs, so that the command can be repeated, each time
        for `--seconds` CPU seconds.
Out:    a table: XLA's peak memory over the predicted peak, whether each kind of collective moves the planned bytes, the part of
        the collectives' time during which the program continues, and the part that kernels lose to them, predicted and by
        the order of the compiled program.
Method: if no plan fits the device, a plan is made without a budget, and its memory is compared all the same (marked *).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import gpt
import jax.numpy as jnp
import llama
import vit
import wide_resnet
from rich.console import Console
from rich.table import Table

import autopar
from autopar.cost.steps import COLLECTIVE_KINDS
from autopar.errors import AutoparError, InfeasibleError
from autopar.verify.targets import find_target

SCANNED = gpt.Config(scanned=True)
MODELS: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
    "gpt-scan": lambda: gpt.make_step(SCANNED),
    "gpt-scan-bf16": lambda: gpt.make_step(replace(SCANNED, dtype=jnp.bfloat16)),
    "gpt-remat": lambda: gpt.make_step(replace(SCANNED, remat=True)),
    "gpt-remat-bf16": lambda: gpt.make_step(replace(SCANNED, remat=True, dtype=jnp.bfloat16)),
    "gpt-unrolled": lambda: gpt.make_step(gpt.Config(layers=4)),
    "gpt-unrolled-bf16": lambda: gpt.make_step(gpt.Config(layers=4, dtype=jnp.bfloat16)),
    "moe-bf16": lambda: gpt.make_step(gpt.Config(layers=4, experts=8, dtype=jnp.bfloat16)),
    "llama-8b": lambda: llama.make_step(llama.LLAMA_8B),
    "wide-resnet": lambda: wide_resnet.make_step(wide_resnet.Config()),
    "vit-bf16": lambda: vit.make_step(vit.Config()),
}
METHODS: dict[str, Callable[..., Any]] = {
    "auto": lambda parts, **options: autopar.Auto(**options),
    "dp0": lambda parts, **options: autopar.DataParallel(zero=0, **options),
    "dp1": lambda parts, **options: autopar.DataParallel(zero=1, **options),
    "dp3": lambda parts, **options: autopar.DataParallel(zero=3, **options),
    "3d": lambda parts, **options: autopar.ThreeD(data=2, tensor=2, pipeline=2, num_microbatches=parts, **options),
    "2 stages": lambda parts, **options: autopar.PipelineParallel(num_stages=2, num_microbatches=parts, **options),
}
NO_BUDGET = 1e15
MICROBATCHES = {"wide-resnet": 1}
"""4, but where the batch is normalized as a whole."""


def main() -> None:
    """Fill the file, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--seconds", type=float, default=240.0, help="CPU seconds after which nothing further is begun")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--target", default="h100")
    parser.add_argument("--again", action="store_true", help="do what the file holds already again")
    chosen = parser.parse_args()
    try:
        find_target(chosen.target, autopar.Cluster.of(f"8 {chosen.target}"))
    except AutoparError as error:  # `make bench` runs everything, also where the compiler is not installed
        print(error)
        return
    found: dict[str, Any] = json.loads(chosen.file.read_text()) if chosen.file and chosen.file.exists() else {}
    for name in chosen.models.split(","):
        for method in chosen.methods.split(","):
            key = f"{name}, {method}"
            if time.process_time() < chosen.seconds and (chosen.again or key not in found):
                found[key] = row(MODELS[name](), METHODS[method], MICROBATCHES.get(name, 4), chosen.target)
                if chosen.file:
                    chosen.file.write_text(json.dumps(found, indent=1) + "\n")
    rows = {f"{name}, {method}": None for name in MODELS for method in METHODS}
    Console(width=160).print(table({key: found[key] for key in rows if key in found}, chosen.target))


def row(case: tuple[Any, Any, Any], method: Callable[..., Any], parts: int, target: str) -> dict[str, Any]:
    """What is found of one model by one method."""
    step, state, batch = case
    cluster, begun = autopar.Cluster.of(f"8 {target}"), time.process_time()

    def planned(budget: float | None) -> Any:
        made = autopar.parallelize(
            step, cluster=cluster, method=method(parts, memory_budget_bytes=budget), batch_argnums=(1,)
        )
        return made.plan(state, batch)

    try:
        plan, fits = planned(None), True
    except InfeasibleError:
        plan, fits = planned(NO_BUDGET), False
    made = time.process_time()
    checked = plan.verify(target)
    return {
        "fits": fits,
        "plan": str(plan.mesh) if plan.schedule == "none" else f"{len(plan.stages)} stages",
        "predicted": list(checked.predicted_bytes),
        "compiled": list(checked.compiled_bytes),
        "bytes": {
            side: {k: sum(p.runs * getattr(p, side).get(k, 0) for p in checked.programs) for k in COLLECTIVE_KINDS}
            for side in ("planned", "emitted")
        },
        "asynchronous": checked.async_share,
        "exposed": checked.exposed_share,
        "predicted exposed": checked.predicted_exposed_share,
        "seconds": [made - begun, time.process_time() - made],
        "problems": list(checked.problems) if fits else [p for p in checked.problems if "budget" not in p],
    }


def table(found: dict[str, Any], target: str) -> Table:
    """All rows."""
    made = Table(title=f"Plans for 8 {target}, by XLA's compiler", title_justify="left", box=None)
    for k, heading in enumerate(
        (
            "model, method",
            "plan",
            "predicted",
            "XLA",
            "ratio",
            "GB moved",
            "bytes",
            "async",
            "exposed: predicted, XLA",
            "plan + compile",
        )
    ):
        made.add_column(heading, justify="right" if k > 1 else "left", no_wrap=True)
    for key, row in found.items():
        ratios = [b / a for a, b in zip(row["predicted"], row["compiled"], strict=True)]
        planned, emitted = row["bytes"]["planned"], row["bytes"]["emitted"]
        made.add_row(
            key,
            row["plan"] + ("" if row["fits"] else " *"),
            f"{max(row['predicted']) / 1e9:.2f} GB",
            f"{max(row['compiled']) / 1e9:.2f} GB",
            ", ".join(f"{ratio:.3f}" for ratio in ratios),
            f"{sum(planned.values()) / 1e9:.2f}",
            "equal" if planned == emitted else "DIFFERENT",
            f"{row['asynchronous']:.0%}",
            f"{row['predicted exposed']:.0%}, {row['exposed']:.0%}",
            " + ".join(f"{seconds:.0f} s" for seconds in row["seconds"]),
        )
    return made


if __name__ == "__main__":
    main()
