"""How long planning takes: GPTs of growing depth, unrolled and scanned, from trace to plan.

    python benchmarks/planning_time.py [--layers 2,12,24,48,96] [--meshes 2x4,8x8]

Plans for described machines; no device is touched. Prints a table: CPU seconds from the step function to the plan
(tracing by JAX included), and of the parts of planning.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import platform
import time

from gpt import Config, make_step
from rich.console import Console
from rich.table import Table

import autopar
from autopar.ir.trace.state import find_roles
from autopar.ir.trace.trace import trace_step
from autopar.search.methods import ShardParallel
from autopar.search.planner import make_plan


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default="2,12,24,48,96")
    parser.add_argument("--meshes", default="2x4,8x8")
    parser.add_argument("--kinds", default="unrolled,scanned")
    parser.add_argument("--solver", default="highs")
    chosen = parser.parse_args()
    table = Table(
        title=f"planning a GPT, CPU seconds, {platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    )
    for heading in (
        "model",
        "mesh",
        "equations",
        "decisions",
        "trace s",
        "plan s",
        "total s",
        "predicted step",
        "gap",
        "solver",
    ):
        table.add_column(heading, justify="left" if heading in ("model", "mesh", "solver") else "right")
    for kind in chosen.kinds.split(","):
        for text in chosen.meshes.split(","):
            shape = tuple(int(size) for size in text.split("x"))
            for layers in map(int, chosen.layers.split(",")):
                row = measure(Config(layers=layers, scanned=kind == "scanned", batch=16), shape, chosen.solver)
                table.add_row(f"{layers} layers, {kind}", text, *row)
                Console().print(f"{layers} layers, {kind} on {text}: {row[4]} s", style="dim")
    Console(width=150).print(table)


def measure(config: Config, shape: tuple[int, ...], solver: str) -> list[str]:
    """One row: trace and plan once."""
    step, state, batch = make_step(config)
    hosts = max(1, math.prod(shape) // 8)
    cluster = autopar.Cluster.of(f"{hosts}x8 h100")
    gc.collect()
    started = time.process_time()
    program = trace_step(step, (state, batch))
    traced = time.process_time()
    plan = make_plan(program, find_roles(program, (1,)), cluster, ShardParallel(mesh_shape=shape, solver=solver))
    done = time.process_time()
    sharded = plan.origin.pipeline.stages[0].sharded
    return [
        str(len(program.jaxpr.eqns)),
        f"{len(sharded.graph.nodes)} in {max(sharded.class_of) + 1}",
        f"{traced - started:.2f}",
        f"{done - traced:.2f}",
        f"{done - started:.2f}",
        f"{plan.cost.step_seconds * 1e3:.2f} ms",
        f"{plan.cost.optimality_gap:.1%}",
        sharded.solution.solver,
    ]


if __name__ == "__main__":
    main()
