"""Many layers on a number of stages that does not divide them: how even the stages are, and how long devices wait.

    python benchmarks/deep.py [--layers 126] [--stages 16] [--microbatches 64] [--schedules 1f1b,zb-h1,auto]

Plans a narrow Llama for described devices, two per stage. Prints for each schedule: the schedule that was chosen, the fewest
and the most layers on the devices of a stage, the part of the step during which devices wait, the seconds of the step, the
peak memory of a device, and the CPU seconds of planning.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import llama
from rich.console import Console
from rich.table import Table

import autopar


def layers_of(plan: autopar.Plan, num_meshes: int) -> list[int]:
    """Layers that the devices of each stage have, in however many pieces."""
    pipeline, found = plan.origin.pipeline, [0] * num_meshes
    cut = pipeline.cut
    weights = next(k for k, path in enumerate(cut.paths) if path.endswith("/q"))
    for at in cut.stacks.inputs[weights]:
        found[plan.values[at].stage % num_meshes] += cut.program.in_avals[at].shape[0]
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=126)
    parser.add_argument("--stages", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--cluster", default="4x8 h100")
    parser.add_argument("--schedules", default="1f1b,zb-h1,interleaved,interleaved-4,auto")
    chosen = parser.parse_args()
    sizes = {"width": 1024, "hidden": 3584, "heads": 16, "vocabulary": 8192, "tokens": 1024}
    step, state, batch = llama.make_step(llama.Llama(layers=chosen.layers, batch=4 * chosen.microbatches, **sizes))
    table = Table(title=f"{chosen.layers} layers on {chosen.stages} stages, {chosen.microbatches} microbatches")
    for heading in ("asked for", "taken", "layers", "waiting", "step", "GB", "CPU s"):
        table.add_column(heading, justify="left" if heading in ("asked for", "taken") else "right")
    for schedule in chosen.schedules.split(","):
        method = autopar.ThreeD(
            data=1, tensor=2, pipeline=chosen.stages, num_microbatches=chosen.microbatches, schedule=schedule
        )
        started = time.process_time()
        parallel = autopar.parallelize(step, cluster=autopar.Cluster.of(chosen.cluster), method=method)
        plan = parallel.plan(state, batch)
        taken, layers = time.process_time() - started, layers_of(plan, chosen.stages)
        waiting = plan.origin.pipeline.waiting_share
        table.add_row(
            schedule,
            plan.schedule,
            f"{min(layers)} to {max(layers)}",
            f"{100 * waiting:.1f} %",
            f"{plan.cost.step_seconds:.4g} s",
            f"{max(plan.cost.peak_bytes) / 1e9:.1f}",
            f"{taken:.0f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
