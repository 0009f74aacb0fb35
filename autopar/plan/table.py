"""The stage table: what a stage of given layers on a given submesh takes, in seconds and in microbatches it can hold.

In:     a step cut into layers, the cluster, options.
Out:    `Table`; of it `Kinds`: for one number of microbatches, seconds and memory of every stage.
Method: each layer that differs from the others is sharded once on every logical mesh of every submesh; a stage's cost is
        the sum of its layers' (Alpa's stage table, filled without compiling anything and without solving equal stages
        twice). A stage that runs its forward pass again is one more kind of stage, slower and smaller: it is sharded
        alike, so this costs no solving.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost import collective_seconds
from autopar.errors import InfeasibleError
from autopar.inter_op.residuals import ALL, CHEAP
from autopar.inter_op.stage_plan import StagePlan, lower_stage
from autopar.inter_op.stage_program import StageProgram, stage_program, with_tasks
from autopar.inter_op.tasks import Tasks, make_tasks
from autopar.ir.canonical import canonical_key
from autopar.mesh import Cluster, LogicalMesh, logical_meshes
from autopar.options import Options
from autopar.plan.cut import CutStep
from autopar.plan.recompute import kept_bytes
from autopar.plan.solve_stages import Solved, solve_stage

Report = Callable[[str], None]

LAYER_GAP = 1e-2
"""Layers are sharded to this part of their cost: they only choose stages."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What one layer costs on one mesh, with the microbatch of one size.

    Attributes:
        work_seconds: Of one microbatch: what shrinks with it.
        fixed_seconds: Of one microbatch: latencies, and operations on no samples, such as adding up gradients.
        once_seconds: Once per step: preparation and update.
        held_bytes: On one device, all through the step: parameters, optimizer state, sums.
        kept_bytes: For each microbatch in flight.
        working_bytes: While it runs.
    """

    work_seconds: float
    fixed_seconds: float
    once_seconds: float
    held_bytes: float
    kept_bytes: float
    working_bytes: float


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Costs of all layers on all meshes.

    Attributes:
        count: Number of microbatches that it was made for.
        levels: Of recomputation, that were tried.
        meshes: Per submesh size, the logical meshes.
        costs: `costs[size][mesh][layer]`, at each level; None: the layer does not fit.
    """

    count: int
    levels: tuple[float, ...]
    meshes: dict[int, list[LogicalMesh]]
    costs: dict[int, list[list[tuple[LayerCost, ...] | None]]]


def fill_table(
    cut: CutStep, borders: Sequence[int], cluster: Cluster, options: Options, solved: Solved, report: Report
) -> Table:
    """Shard every layer on every mesh; equal layers once.

    Args:
        cut: The step in phases.
        borders: First segment of each layer.
        cluster: The machine.
        options: Solver, time limit, memory budget, levels of recomputation.
        solved: Stages solved before; extended.
        report: Called with a line of progress before each mesh is tried.
    """
    num_layers = len(borders)
    levels = (options.recompute_levels(1) or (CHEAP,)) + ((ALL,) if options.recompute == "auto" else ())
    at_level = [
        make_tasks(cut.program.jaxpr, cut.split, cut.chain, borders, levels=[level] * num_layers) for level in levels
    ]
    programs = [stage_program(at_level[0], k, cut.roles.aliases, cut.batch.dims) for k in range(num_layers)]
    keys = [canonical_key(p.jaxpr) for p in programs]
    meshes = {size: logical_meshes(cluster, size, max_axes=2) for size in submesh_sizes(cluster)}
    costs: dict[int, list[list[tuple[LayerCost, ...] | None]]] = {}

    def cost(program: StageProgram, mesh: LogicalMesh) -> tuple[LayerCost, ...] | None:
        try:
            made = solve_stage(program, mesh, cluster, options, solved, gap=LAYER_GAP)
        except InfeasibleError:
            return None
        others = [lower_stage(with_tasks(program, t), mesh, cluster.device, made.sharded) for t in at_level[1:]]
        return tuple(_cost(stage, tasks) for stage, tasks in zip((made, *others), at_level, strict=True))

    for size, shapes in meshes.items():
        costs[size] = []
        for mesh in shapes:
            report(f"sharding {len(set(keys))} kinds of layers on {mesh}")
            known: dict[Hashable, tuple[LayerCost, ...] | None] = {}
            for key, program in zip(keys, programs, strict=True):
                if key not in known:
                    known[key] = cost(program, mesh)
            costs[size].append([known[key] for key in keys])
    return Table(cut.split.count, levels, meshes, costs)


def _cost(stage: StagePlan, tasks: Tasks) -> LayerCost:
    work = fixed = once = 0.0
    kept, working = kept_bytes(tasks, stage), 0
    held: dict[object, int] = {}
    for task in stage.tasks:
        # What is read beside that and comes from other stages is there for one microbatch.
        read = sum(b.num_bytes for b in task.inputs if b.slot.kind == "loop")
        working = max(working, task.working_bytes + max(0, read - kept))
        for border in (*task.inputs, *task.outputs):
            if border.slot.kind in ("argument", "const", "piece", "sum", "rows"):
                held[border.slot.kind, border.slot.key] = border.num_bytes
        if task.task.kind in ("F", "B", "W"):
            latency = sum(c.times * collective_seconds(c.kind, 0, c.axes, stage.mesh) for c in task.collectives)
            same = min(latency, task.communication_seconds) + task.batchless_seconds
            fixed += same
            work += task.seconds - same
        else:
            once += task.seconds
    return LayerCost(work, fixed, once, float(sum(held.values())), float(kept), float(working))


def submesh_sizes(cluster: Cluster) -> list[int]:
    """Devices that one stage may have: a divisor of a host's, or whole hosts whose number divides theirs; not all."""
    inside = [n for n in range(1, cluster.devices_per_host + 1) if cluster.devices_per_host % n == 0]
    hosts = [n * cluster.devices_per_host for n in range(2, cluster.hosts + 1) if cluster.hosts % n == 0]
    return [n for n in (*inside, *hosts) if n < cluster.num_devices]


@dataclass(frozen=True, slots=True, eq=False)
class Kinds:
    """Kinds of stages, for one number of microbatches: a size of submesh and a level of recomputation each.

    Attributes:
        sizes: Devices of each kind.
        seconds: `[first, last, kind]`, of one microbatch; inf: does not fit.
        flight: `[first, last, kind]`: how many microbatches the memory holds at once.
        meshes: (first, last, kind) -> the logical mesh that this is on.
    """

    sizes: list[int]
    seconds: np.ndarray
    flight: np.ndarray
    meshes: dict[tuple[int, int, int], LogicalMesh]

    def first(self, num_kinds: int) -> Kinds:
        """The first of these kinds only."""
        own = slice(num_kinds)
        return Kinds(self.sizes[own], self.seconds[..., own], self.flight[..., own], self.meshes)


def kinds_of(table: Table, count: int, num_layers: int, budget: float) -> Kinds:
    """Seconds and memory of all stages, each on its fastest mesh.

    Args:
        table: Costs of layers.
        count: Number of microbatches.
        num_layers: Number of layers.
        budget: Bytes of one device.
    """
    kinds = [(size, level) for level in range(len(table.levels)) for size in table.meshes]
    seconds = np.full((num_layers, num_layers, len(kinds)), np.inf)
    flight = np.zeros(seconds.shape)
    chosen: dict[tuple[int, int, int], LogicalMesh] = {}
    for number, (size, level) in enumerate(kinds):
        for mesh, layers in zip(table.meshes[size], table.costs[size], strict=True):
            for first in range(num_layers):
                for last in range(first, num_layers):
                    costs = layers[last]
                    if costs is None:
                        break
                    members = [layer for layer in layers[first : last + 1] if layer is not None]
                    time, fits = _stage(members, level, table, count, budget)
                    if fits >= 1 and time < seconds[first, last, number]:
                        seconds[first, last, number] = time
                        flight[first, last, number] = fits
                        chosen[first, last, number] = mesh
    # No stage runs all again that holds as many microbatches as there can be stages behind it without.
    enough = np.minimum(count, num_layers - np.arange(num_layers))[:, None, None]
    plain = len(table.meshes)
    for level in range(1, len(table.levels)):
        seconds[..., level * plain : (level + 1) * plain][flight[..., :plain] >= enough] = np.inf
    return Kinds([size for size, _ in kinds], seconds, flight, chosen)


def _stage(
    layers: Sequence[tuple[LayerCost, ...]], level: int, table: Table, count: int, budget: float
) -> tuple[float, int]:
    """Seconds of a stage for one microbatch, and how many microbatches its memory holds; of those not more than `count`.

    Where everything runs again, either each layer's input is kept, or the stage's, and all that its forward pass makes
    is there once.
    """
    scale = table.count / count
    costs = [layer[level] for layer in layers]
    time = sum(c.work_seconds * scale + c.fixed_seconds + c.once_seconds / count for c in costs)
    room = budget - sum(c.held_bytes for c in costs)

    def fits(kept: float, working: float) -> int:
        left = room - working * scale
        if left < 0:
            return 0
        return min(count, math.floor(left / (kept * scale))) if kept and math.isfinite(left) else count

    most = fits(sum(c.kept_bytes for c in costs), max(c.working_bytes for c in costs))
    if table.levels[level] == ALL and len(table.levels) > 1:
        once = sum(layer[0].kept_bytes for layer in layers) + max(layer[0].working_bytes for layer in layers)
        most = max(most, fits(costs[0].kept_bytes, once))
    return time, most
