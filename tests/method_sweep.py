"""Every method is a point of `Auto()`'s space: models of many kinds on machines of many kinds, each method against `Auto()`.

In:     `tests/models/registry.py`, with 8 times the samples; described machines; the starts of `benchmarks/methods.py`.
Out:    `faster_methods`, used by the tests; `python -m tests.method_sweep` plans the whole table and prints it.
Method: by predicted seconds; nothing runs. Machines compute and send as much slower as the models are smaller than real ones:
        else kernels' launches would be all of a step, and no plan worth its planning.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

import autopar
from autopar.errors import AutoparError
from autopar.ir.program import Program
from autopar.ir.trace.state import Roles, find_roles
from autopar.ir.trace.trace import trace_step
from autopar.search.methods import Method, method_text
from autopar.search.planner import make_plan
from tests.cells import Judged, add_arguments, run_cells
from tests.sweep import failed, use_virtual_devices

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from methods import families, settings_of  # noqa: E402

MODELS = {
    "mlp_schedule_clip": "plain layers",
    "gpt_scan_remat_clipped": "scanned layers, each in a checkpoint",
    "gpt_unrolled": "layers in a list",
    "gpt_tied_dropout": "tied embeddings, random bits",
    "moe_top2_capacity": "experts",
    "resnet_batchnorm": "convolutions, statistics of the batch",
    "equinox_vit": "a token of the class",
    "haiku_lstm": "a scan over time",
    "linen_encoder_decoder": "two stacks of layers",
    "equinox_unet": "connections past many layers",
}
CLUSTERS = ("1x8 h100", "2x4 v100", "1x4 a100", "4x4 tpu v5e")
MORE_SAMPLES, SLOWER = 8, 10_000
ROUNDING = 1 + 1e-6


def machine(text: str) -> autopar.Cluster:
    """A machine of the catalog with slower devices and links."""
    cluster = autopar.Cluster.of(text)

    def slower(link: autopar.Link) -> autopar.Link:
        return dataclasses.replace(
            link,
            bytes_per_second=link.bytes_per_second / SLOWER,
            switch_bytes_per_second=link.switch_bytes_per_second / SLOWER,
            in_host=(link.in_host[0], link.in_host[1] / SLOWER),
        )

    flops = cluster.device.peak_flops
    rates = {dtype: rate / SLOWER for dtype, rate in flops.items()} if hasattr(flops, "items") else flops / SLOWER
    device = dataclasses.replace(
        cluster.device, peak_flops=rates, memory_bytes_per_second=cluster.device.memory_bytes_per_second / SLOWER
    )
    return dataclasses.replace(cluster, device=device, intra=slower(cluster.intra), inter=slower(cluster.inter))


@functools.lru_cache(1)
def traced(name: str) -> tuple[Program, Roles, dict[str, Any]]:
    """A model's program and roles, and the settings without which it cannot be split into microbatches."""
    from tests.models.registry import CASES

    case = CASES[name]()
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((MORE_SAMPLES * x.shape[0], *x.shape[1:]), x.dtype), case.batches[0]
    )
    program = trace_step(case.step, (case.state, batch))
    own = {"microbatch_semantics": "per_microbatch"} if case.refused == "batch statistics" else {}
    return program, find_roles(program, (1,)), own


def methods(cluster: autopar.Cluster, auto: autopar.Plan, own: dict[str, Any]) -> Iterator[Method]:
    """Each named method at several settings, and as near as it can be to an automatic plan."""
    chosen = {"stages": len(auto.stages), "mesh": auto.stages[0].logical_mesh.shape}
    chosen |= {"num_microbatches": auto.num_microbatches, "schedule": auto.schedule}
    made: dict[str, Method] = {}
    for family in families(cluster, 3):
        for settings in family.beginning_at(settings_of(chosen)).starts:
            try:
                method = family.method(**settings, **own)
            except AutoparError:
                continue
            made.setdefault(method_text(method), method)
    yield from made.values()


def faster_methods(name: str, text: str) -> tuple[autopar.Plan, dict[str, float], list[str]]:
    """Plan one model on one machine.

    Returns:
        The automatic plan, the predicted seconds of each method that has a plan, and the methods that are faster.
    """
    program, roles, own = traced(name)
    cluster = machine(text)
    auto = make_plan(program, roles, cluster, autopar.Auto(**own))
    seconds: dict[str, float] = {}
    for method in methods(cluster, auto, own):
        try:
            seconds[method_text(method)] = make_plan(program, roles, cluster, method).cost.step_seconds
        except AutoparError:
            continue  # this model cannot be split so
    return auto, seconds, [known for known in seconds if auto.cost.step_seconds > seconds[known] * ROUNDING]


def main() -> int:
    """Plan the table, or what the arguments choose of it, and print it."""
    use_virtual_devices()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--clusters", default=",".join(CLUSTERS))
    add_arguments(parser)
    chosen = parser.parse_args()
    cells = [(name, text) for name in chosen.models.split(",") for text in chosen.clusters.split(",")]
    return run_cells(cells, lambda cell: _judge(*cell), chosen, "tests.method_sweep")


def _judge(name: str, text: str) -> Judged:
    started = time.process_time()
    try:
        auto, seconds, faster = faster_methods(name, text)
    except Exception as error:
        return failed(error)
    best = min(seconds, key=lambda method: seconds[method])
    ratio = auto.cost.step_seconds / seconds[best]
    found = f"{auto.cost.step_seconds * 1e3:9.3f} ms  {ratio:.4f} of {best}, the best of {len(seconds)}"
    taken = f"{time.process_time() - started:.0f} s"
    return Judged(not faster, f"{'FAILED' if faster else 'ok    '} {found}  {taken}")


if __name__ == "__main__":
    sys.exit(main())
