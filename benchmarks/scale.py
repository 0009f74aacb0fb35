"""How long `Auto()` takes for large models on many devices, by pass, and the memory of doing so.

    python benchmarks/scale.py [--cases gpt-1x8,llama-8b-8x8,llama-70b-64x8,llama-405b-256x8,llama-405b-2048x8]

Plans for described machines; no device is touched. Each case is planned in a process of its own. Prints CPU seconds from the
step function to the plan, tracing by JAX included; those of the planner's passes; the most memory that the process took; and
what was decided.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import gpt
import llama
from rich.console import Console
from rich.table import Table

import autopar


def _llama(config: llama.Llama, **changes: Any) -> Callable[[], Any]:
    return lambda: llama.make_step(dataclasses.replace(config, **changes))


CASES: dict[str, tuple[str, Callable[[], Any], float]] = {
    "gpt-1x8": ("1x8 h100", lambda: gpt.make_step(gpt.Config(layers=24, width=1024, heads=16)), 5),
    "llama-8b-8x8": ("8x8 h100", _llama(llama.LLAMA_8B, batch=512), 20),
    "llama-70b-64x8": ("64x8 h100", _llama(llama.LLAMA_70B, batch=1024), 40),
    "llama-405b-256x8": ("256x8 h100", _llama(llama.LLAMA_405B, batch=2048, tokens=8192), 60),
    "llama-405b-2048x8": ("2048x8 h100", _llama(llama.LLAMA_405B, batch=2048, tokens=8192), 60),
}
"""Cluster, model, and the CPU seconds that it should take at most."""
COLUMNS = ("case", "CPU s", "at most", "meshes", "microbatches", "stages", "GiB", "step", "decided")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--alone", default="", help="measure this one here, as JSON")
    chosen = parser.parse_args()
    if chosen.alone:
        print(json.dumps(measure(chosen.alone)))
        return
    table = Table(title="planning everything: CPU seconds")
    for heading in COLUMNS:
        table.add_column(heading, justify="left" if heading in ("case", "decided") else "right")
    for name in chosen.cases.split(","):
        command = [sys.executable, __file__, "--alone", name]
        answer = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
        table.add_row(*json.loads(answer.stdout.splitlines()[-1]))
    Console(width=160).print(table)


def measure(name: str) -> list[str]:
    """One row."""
    cluster, make, most = CASES[name]
    step, state, batch = make()
    parallel = autopar.parallelize(step, cluster=autopar.Cluster.of(cluster), batch_argnums=(1,))
    started = time.process_time()
    plan = parallel.plan(state, batch)
    seconds = time.process_time() - started
    passes = dict(plan.cost.search.pass_seconds)
    stages = f"{len(plan.stages)} stages, {plan.schedule}, " if len(plan.stages) > 1 else ""
    return [
        name,
        f"{seconds:.1f}",
        f"{most:g}",
        *(f"{passes.get(each, 0.0):.1f}" for each in ("meshes", "microbatches", "stages")),
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f}",
        f"{plan.cost.step_seconds:.3f} s",
        f"{stages}{plan.mesh}, {plan.num_microbatches} microbatches",
    ]


if __name__ == "__main__":
    main()
