"""Compares searches: the best cost that each finds for the same sharding problems, against its CPU seconds.

    python benchmarks/search.py [--models gpt,experts,wide_resnet,unet,mlp] [--mesh 2x4] [--png searches.png]

Plans for eight described H100; no device is touched. The cost is that of the problem, over the cost that message passing and
the ILP find; the picture needs matplotlib.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import gpt
import mlp
import numpy as np
import unet
import wide_resnet
from rich.console import Console
from rich.table import Table

import autopar
from autopar.intra_op.build_graph import build_graph
from autopar.intra_op.costs import build_problem
from autopar.intra_op.elimination import eliminate
from autopar.intra_op.problem import Problem
from autopar.intra_op.searches import SEARCHES, search
from autopar.intra_op.solve import solve
from autopar.intra_op.tying import tie_nodes
from autopar.ir.trace.state import find_roles
from autopar.ir.trace.trace import trace_step
from autopar.mesh import logical_mesh

MODELS: dict[str, Callable[[], Any]] = {
    "gpt": lambda: gpt.make_step(gpt.Config(layers=6, batch=16)),
    "experts": lambda: gpt.make_step(gpt.Config(layers=4, experts=8, batch=16)),
    "wide_resnet": lambda: wide_resnet.make_step(wide_resnet.Config(depths=(1, 1, 1, 1))),
    "unet": lambda: unet.make_step(unet.Config(multiples=(1, 2), blocks=1, attention=(1,))),
    "mlp": lambda: mlp.make_step(1024, 6, 1024),
}
EFFORTS = (1, 4, 16, 64)
"""Steps for each node of the problem."""


def main() -> None:
    """Print the table, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--mesh", default="2x4")
    parser.add_argument("--png", default="")
    chosen = parser.parse_args()
    names = chosen.models.split(",")
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name in names:
        problem = problem_of(name, tuple(int(size) for size in chosen.mesh.split("x")))
        found[name] = compare(problem)
        Console().print(f"{name}: {len(problem.costs)} decisions", style="dim")
    table = Table(title=f"cost over the best, mesh {chosen.mesh} (CPU seconds)")
    table.add_column("search")
    for name in names:
        table.add_column(name, justify="right")
    for kind in found[names[0]]:
        table.add_row(kind, *(_text(found[name][kind][-1]) for name in names))
    Console(width=40 + 24 * len(names)).print(table)
    if chosen.png:
        draw(found, chosen.png)


def problem_of(name: str, shape: tuple[int, ...]) -> Problem:
    """The sharding problem of a model on a mesh."""
    step, state, batch = MODELS[name]()
    program = trace_step(step, (state, batch))
    roles = find_roles(program, (1,))
    cluster = autopar.Cluster.of("1x8 h100")
    graph = build_graph(program.jaxpr, logical_mesh(cluster, shape), roles.aliases, roles.batch)
    return build_problem(graph, cluster.device, tie_nodes(graph, {}))


def compare(problem: Problem) -> dict[str, list[tuple[float, float]]]:
    """For each search (CPU seconds, cost over the best), of growing effort; elimination is done for all alike."""
    started = time.process_time()
    reduced = eliminate(problem)
    eliminating = time.process_time() - started
    started = time.process_time()
    least = solve(problem).objective
    found = {"message passing, ILP": [(time.process_time() - started, 1.0)]}
    for name in SEARCHES:
        for effort in EFFORTS:
            started = time.process_time()
            choices = search(reduced.problem, name, effort * len(reduced.kept))
            seconds = eliminating + time.process_time() - started
            cost = reduced.problem.cost(choices) + reduced.constant
            best = min([cost / least, *(known for _, known in found.get(name, ()))])
            found.setdefault(name, []).append((seconds, best))
    return found


def _text(result: tuple[float, float]) -> str:
    seconds, ratio = result
    return f"{ratio:.3f} ({seconds:.2f} s)" if math.isfinite(ratio) else f"forbidden ({seconds:.2f} s)"


def draw(found: dict[str, dict[str, list[tuple[float, float]]]], path: str) -> None:
    """One picture for each model: cost over the best against CPU seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(found), figsize=(4 * len(found), 4), squeeze=False, sharex=True, sharey=True)
    for place, (name, kinds) in zip(axes[0], found.items(), strict=True):
        for kind, results in kinds.items():
            seconds, ratios = np.array(results).T
            place.plot(seconds, ratios, marker="o", label=kind)
        place.set(title=name, xscale="log", yscale="log", xlabel="CPU seconds")
        place.set_yticks([1, 2, 5, 10], ["1", "2", "5", "10"])
        place.minorticks_off()
    axes[0][0].set_ylabel("cost over the best")
    axes[0][0].legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
