"""The search over pipelines: stages, submeshes, logical shapes, microbatches and schedule together.

In:     a traced step, the cluster, options.
Out:    the best `PipelinePlan`, and what was tried; `plan/planner.py` compares it with the plans without stages.
Method: the step is cut into a chain of layers of like work, at places where little crosses. Each layer that differs from
        the others is sharded once on every logical mesh of every submesh; a stage's cost is the sum of its layers'
        (Alpa's stage table, filled without compiling anything and without solving equal stages twice). The DP of
        `inter_op/slicing.py` picks stages for each number of microbatches; the best few are then sharded as they are,
        emitted, checked and simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost import collective_seconds
from autopar.errors import AutoparError, BatchError, InfeasibleError, MicrobatchError
from autopar.inter_op.chain import balanced_borders
from autopar.inter_op.slicing import slice_stages
from autopar.inter_op.stage_plan import StagePlan
from autopar.inter_op.stage_program import stage_program
from autopar.inter_op.tasks import make_tasks
from autopar.ir.canonical import canonical_key
from autopar.ir.state import Roles
from autopar.ir.trace import Program
from autopar.ir.unstack import layer_count
from autopar.mesh import Cluster, LogicalMesh, logical_meshes
from autopar.options import Options
from autopar.plan.cut import Cut, cut_step
from autopar.plan.pipeline import PipelinePlan, plan_pipeline
from autopar.plan.schedules import SCHEDULES, Schedule
from autopar.plan.solve_stages import Solved, solve_stage

Report = Callable[[str], None]

MAX_LAYERS = 16
LAYER_SLACK = 0.35
"""Layers may be so uneven, that more of them are equal."""
LAYER_GAP = 1e-2
"""Layers are sharded to this part of their cost: they only choose stages."""
COUNTS = (4, 8, 16, 32, 64, 128)
"""Numbers of microbatches that are tried, if they divide the batch."""
FINALISTS = 2
"""At least so many of the best pipelines of the table are planned as they are; of small programs more."""
EFFORT = 6000
"""As many as this many equations allow, each pipeline planned again counting the program's."""
MOST = 16


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
class _Table:
    """Costs of all layers on all meshes.

    Attributes:
        count: Number of microbatches that it was made for.
        meshes: Per submesh size, the logical meshes.
        costs: `costs[size][mesh][layer]`.
    """

    count: int
    meshes: dict[int, list[LogicalMesh]]
    costs: dict[int, list[list[LayerCost | None]]]


@dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    """A pipeline to be planned.

    Attributes:
        count: Number of microbatches.
        seconds: What the table says of it.
        sizes: Devices of each stage.
        firsts: First layer of each stage; None: balanced anew, as many parts of a scan as stages.
        meshes: Of each stage, the logical meshes to try.
    """

    count: int
    seconds: float
    sizes: tuple[int, ...]
    firsts: tuple[int, ...] | None
    meshes: tuple[tuple[LogicalMesh, ...], ...]


def search_pipelines(
    program: Program, roles: Roles, cluster: Cluster, options: Options, report: Report = lambda text: None
) -> tuple[PipelinePlan | None, list[tuple[str, str]]]:
    """The best pipeline that the search finds.

    Returns:
        The pipeline (None: none fits, or the step cannot be cut), and (what was tried, its time or why not).
    """
    tried: list[tuple[str, str]] = []
    counts = _counts(program, roles)
    reference = counts[len(counts) // 2]
    try:
        cut = cut_step(program, roles, MAX_LAYERS, reference, options.microbatch_semantics)
    except (MicrobatchError, BatchError) as error:
        tried.append((f"{reference} microbatches", error.summary))
        counts, reference = [1], 1
        cut = cut_step(program, roles, MAX_LAYERS, 1, options.microbatch_semantics)
    num_layers = min(MAX_LAYERS, cut.chain.num_segments)
    if num_layers < 2:
        return None, tried
    solved = Solved()
    layers = balanced_borders(cut.chain, num_layers, LAYER_SLACK)
    table = _fill(cut, layers, cluster, options, solved, report)
    candidates = _slicings(table, counts, [cut.chain.cut_bytes[k] for k in layers], cluster, options)
    cuts: dict[tuple[int, int], Cut] = {_cut_key(program, MAX_LAYERS, reference): cut}
    best: tuple[PipelinePlan, _Candidate] | None = None

    def attempt(candidate: _Candidate, schedule: Schedule) -> None:
        nonlocal best
        text = _text(candidate, schedule)
        report(f"planning {text}")
        try:
            plan = _plan(program, roles, cluster, options, candidate, schedule, num_layers, solved, cuts)
        except AutoparError as error:
            tried.append((text, error.summary))
            return
        tried.append((text, f"{plan.seconds:.3e} s"))
        if best is None or plan.seconds < best[0].seconds:
            best = plan, candidate

    finalists = max(FINALISTS, min(MOST, EFFORT // max(1, len(cut.program.jaxpr.eqns))))
    for candidate in candidates[:finalists]:
        attempt(candidate, SCHEDULES["1f1b"])
    if best is not None:
        attempt(best[1], SCHEDULES["zb-h1"])
    return (best[0] if best is not None else None), tried


def _counts(program: Program, roles: Roles) -> list[int]:
    sizes = [program.in_avals[k].shape[0] for k in roles.batch]
    found = [m for m in COUNTS if sizes and all(size % m == 0 for size in sizes)]
    if found:
        return found
    every = [m for m in range(2, 129) if sizes and all(size % m == 0 for size in sizes)]
    return every[-3:] or [1]


def submesh_sizes(cluster: Cluster) -> list[int]:
    """Devices that one stage may have: a divisor of a host's, or whole hosts whose number divides theirs; not all."""
    inside = [n for n in range(1, cluster.devices_per_host + 1) if cluster.devices_per_host % n == 0]
    hosts = [n * cluster.devices_per_host for n in range(2, cluster.hosts + 1) if cluster.hosts % n == 0]
    return [n for n in (*inside, *hosts) if n < cluster.num_devices]


def _fill(
    cut: Cut, borders: Sequence[int], cluster: Cluster, options: Options, solved: Solved, report: Report
) -> _Table:
    """Shard every layer on every mesh; equal layers once."""
    tasks = make_tasks(cut.program.jaxpr, cut.split, cut.chain, borders)
    programs = [stage_program(tasks, k, cut.roles.aliases, cut.batch.dims) for k in range(len(borders))]
    keys = [canonical_key(p.jaxpr) for p in programs]
    meshes = {size: logical_meshes(cluster, size, max_axes=2) for size in submesh_sizes(cluster)}
    costs: dict[int, list[list[LayerCost | None]]] = {}
    for size, shapes in meshes.items():
        costs[size] = []
        for mesh in shapes:
            report(f"sharding {len(set(keys))} kinds of layers on {mesh}")
            known: dict[Hashable, LayerCost | None] = {}
            for key, program in zip(keys, programs, strict=True):
                if key not in known:
                    try:
                        known[key] = _cost(solve_stage(program, mesh, cluster, options, solved, gap=LAYER_GAP))
                    except InfeasibleError:
                        known[key] = None
            costs[size].append([known[key] for key in keys])
    return _Table(cut.split.count, meshes, costs)


def _cost(stage: StagePlan) -> LayerCost:
    work = fixed = once = 0.0
    kept = working = 0
    held: dict[object, int] = {}
    for task in stage.tasks:
        working = max(working, task.working_bytes)
        for border in (*task.inputs, *task.outputs):
            if border.slot.kind in ("argument", "const", "piece", "sum", "rows"):
                held[border.slot.kind, border.slot.key] = border.num_bytes
        if task.task.kind in ("F", "B", "W"):
            latency = sum(c.times * collective_seconds(c.kind, 0, c.axes, stage.mesh) for c in task.collectives)
            same = min(latency, task.communication_seconds) + task.batchless_seconds
            fixed += same
            work += task.seconds - same
            if task.task.kind == "B":
                kept += sum(b.num_bytes for b in task.inputs if b.slot.kind == "loop")
        else:
            once += task.seconds
    return LayerCost(work, fixed, once, float(sum(held.values())), float(kept), float(working))


def _slicings(
    table: _Table, counts: Sequence[int], crossing_bytes: Sequence[float], cluster: Cluster, options: Options
) -> list[_Candidate]:
    """For each number of microbatches the best slicing, best first."""
    num_layers = len(crossing_bytes)
    budget = options.memory_budget_bytes or cluster.device.memory_bytes
    sizes = list(table.meshes)
    found = []
    for count in counts:
        scale = table.count / count
        seconds = np.full((num_layers, num_layers, len(sizes)), np.inf)
        flight = np.zeros((num_layers, num_layers, len(sizes)))
        chosen: dict[tuple[int, int, int], LogicalMesh] = {}
        for s, size in enumerate(sizes):
            for mesh, layers in zip(table.meshes[size], table.costs[size], strict=True):
                for first in range(num_layers):
                    time = once = held = kept = working = 0.0
                    for last in range(first, num_layers):
                        layer = layers[last]
                        if layer is None:
                            break
                        time += layer.work_seconds * scale + layer.fixed_seconds
                        once += layer.once_seconds
                        held += layer.held_bytes
                        kept += layer.kept_bytes * scale
                        working = max(working, layer.working_bytes * scale)
                        room = budget - held - working
                        fits = math.floor(room / kept) if kept and math.isfinite(room) else count
                        total = time + once / count
                        if (room >= 0 and fits >= 1) and total < seconds[first, last, s]:
                            seconds[first, last, s] = total
                            flight[first, last, s] = fits
                            chosen[first, last, s] = mesh
        crossing = _transfers(crossing_bytes, cluster) * scale
        found += _equal_stages(table, seconds, flight, crossing, count, num_layers, cluster)
        try:
            slicing = slice_stages(
                seconds,
                sizes,
                cluster.num_devices,
                count,
                transfer_seconds=crossing,
                max_in_flight=flight,
                gap=0.02,
            )
        except InfeasibleError:
            continue
        stages = slicing.stages
        alike = len({s.last - s.first for s in stages}) == 1
        found.append(
            _Candidate(
                count,
                slicing.latency_seconds,
                tuple(sizes[s.submesh] for s in stages),
                None if alike else tuple(s.first for s in stages),
                tuple((chosen[s.first, s.last, s.submesh],) for s in stages),
            )
        )
    # Equal stages tried on all their meshes stand for the same stages on one.
    different = {(c.count, c.sizes, c.firsts): c for c in reversed(found)}
    return sorted(different.values(), key=lambda c: c.seconds)


def _equal_stages(
    table: _Table,
    seconds: np.ndarray,
    flight: np.ndarray,
    crossing: np.ndarray,
    count: int,
    num_layers: int,
    cluster: Cluster,
) -> list[_Candidate]:
    """Pipelines of equally many layers on equal submeshes, as one would write them by hand."""
    found = []
    for s, size in enumerate(table.meshes):
        num_stages = cluster.num_devices // size
        if cluster.num_devices % size or not 2 <= num_stages <= num_layers:
            continue
        firsts = [round(k * num_layers / num_stages) for k in range(num_stages)]
        lasts = [first - 1 for first in firsts[1:]] + [num_layers - 1]
        times = [float(seconds[a, b, s]) for a, b in zip(firsts, lasts, strict=True)]
        fits = all(
            flight[a, b, s] >= min(count, num_stages - k) for k, (a, b) in enumerate(zip(firsts, lasts, strict=True))
        )
        if fits and np.isfinite(times).all():
            latency = sum(times) + (count - 1) * max(times) + sum(float(crossing[a]) for a in firsts[1:])
            meshes = tuple(table.meshes[size])
            found.append(_Candidate(count, latency, (size,) * num_stages, None, (meshes,) * num_stages))
    return found


def _transfers(crossing_bytes: Sequence[float], cluster: Cluster) -> np.ndarray:
    """Seconds per microbatch to bring what crosses each border over it, between hosts, all devices of a host at once."""
    link, lanes = cluster.inter, cluster.devices_per_host
    return 2 * link.latency_seconds + np.array(crossing_bytes) / lanes / link.bytes_per_second


def _plan(
    program: Program,
    roles: Roles,
    cluster: Cluster,
    options: Options,
    candidate: _Candidate,
    schedule: Schedule,
    num_layers: int,
    solved: Solved,
    cuts: dict[tuple[int, int], Cut],
) -> PipelinePlan:
    """Plan a candidate as it is; `cuts` are those made before, by parts and microbatches."""
    num_stages, firsts = len(candidate.sizes), candidate.firsts
    parts = num_stages if firsts is None else MAX_LAYERS
    key = _cut_key(program, parts, candidate.count)
    if key not in cuts:
        cuts[key] = cut_step(program, roles, parts, candidate.count, options.microbatch_semantics)
    cut = cuts[key]
    if firsts is None:
        borders = balanced_borders(cut.chain, num_stages)
    else:
        layers = balanced_borders(cut.chain, num_layers, LAYER_SLACK)
        borders = tuple(layers[first] for first in firsts)
    return plan_pipeline(cut, borders, candidate.meshes, cluster, schedule, options, solved)


def _cut_key(program: Program, parts: int, count: int) -> tuple[int, int]:
    """What makes two cuts equal: only scans over layers are taken into parts."""
    return parts if layer_count(program.jaxpr) else 0, count


def _text(candidate: _Candidate, schedule: Schedule) -> str:
    sizes = "+".join(map(str, candidate.sizes))
    return f"{len(candidate.sizes)} stages on {sizes}, {candidate.count} microbatches, {schedule.name}"
