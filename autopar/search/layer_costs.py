"""Costs each layer on each logical mesh of each submesh.

In:     a step that can be cut into layers for any number of microbatches, the cluster, options.
Out:    `LayerCosts`: for a submesh and a number of microbatches, a `LayerCost` per logical mesh and layer.
Method: each distinct layer is sharded once on every logical mesh of every submesh (Alpa's stage table, filled without
        compiling, and without solving equal layers twice), for one number of microbatches; for other numbers its cost is
        scaled like its kernels' seconds, without solving. This is exact enough while the samples of a microbatch divide
        over the devices alike; otherwise it is a guess until `solve` is called. Costs of layers larger than memory are
        guesses, too: sharding them within the budget takes many times as long, and they get slower. Until `shard_on` is
        called for a submesh, its layers cost a lower bound by their kernels: most submeshes cannot win even so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost import collective_seconds
from autopar.errors import AutoparError, ConstraintError, InfeasibleError
from autopar.inter_op.cut import CutStep
from autopar.inter_op.equal_stages import lowered
from autopar.inter_op.residuals import ALL, CHEAP
from autopar.inter_op.stage import RESIDENT, StageProgram
from autopar.inter_op.stage_plan import StagePlan, lower_stage, peak_bytes_here
from autopar.inter_op.stage_program import stage_program, with_tasks
from autopar.inter_op.tasks import Tasks, make_tasks
from autopar.inter_op.weigh import LayerKernels
from autopar.ir.signature import canonical_key
from autopar.mesh import Cluster, LogicalMesh, logical_meshes
from autopar.search.pins import RestrictStage, restrict_stages
from autopar.search.progress import Report, part_of
from autopar.search.recompute import kept_bytes
from autopar.search.solve_stages import Terms, solve_stage
from autopar.tuning import TUNING


@dataclass(frozen=True, slots=True)
class LayerCost:
    """The cost of one layer on one mesh, for one size of microbatches; bytes are those of one device.

    Attributes:
        work_seconds: Seconds per microbatch that scale with its size.
        fixed_seconds: Seconds per microbatch that do not: latencies, operations without a batch dim (adding up gradients).
        once_seconds: Seconds per step: preparation and update.
        resident_bytes: Bytes held throughout the step: parameters, optimizer state, sums.
        kept_bytes: Bytes of residuals per microbatch in flight.
        working_bytes: Further bytes while the layer runs.
        exposed_seconds: The part of `work_seconds` in which no kernel runs; beside other layers some of it may be hidden.
    """

    work_seconds: float
    fixed_seconds: float
    once_seconds: float
    resident_bytes: float
    kept_bytes: float
    working_bytes: float
    exposed_seconds: float = 0.0


Costs = list[list[tuple[LayerCost, ...] | None]]
"""`[mesh][layer]`, at each level; None: no plan."""


@dataclass(frozen=True, slots=True)
class _Sharded:
    """All layers, sharded on the meshes of a submesh for one number of microbatches, and whether all fit memory."""

    costs: Costs
    fits: bool


class LayerCosts:
    """Costs of all layers on all meshes, for any number of microbatches.

    Attributes:
        num_layers: Number of layers.
        work: Work of each layer, in any unit.
        levels: Recomputation levels that are tried.
        meshes: Submesh size -> its logical meshes.
    """

    def __init__(
        self,
        cut_for: Callable[[int], CutStep],
        borders: Sequence[int],
        work: np.ndarray,
        sizes: Sequence[int],
        batch_sizes: Sequence[int],
        counts: Sequence[int],
        terms: Terms,
        report: Report,
    ):
        """Shards nothing yet.

        Args:
            cut_for: The step in phases, for a number of microbatches.
            borders: First segment of each layer.
            work: Work of each layer.
            sizes: Numbers of devices that a stage may have.
            batch_sizes: Number of samples in each batch argument.
            counts: Numbers of microbatches; each mesh is solved for one of them.
            terms: Terms of sharding.
            report: Called with a line of progress before each mesh is tried.
        """
        cluster, options = terms.cluster, terms.options
        self.num_layers, self.work, self._borders = len(borders), work, borders
        self.levels = (options.recompute_levels(1) or (CHEAP,)) + ((ALL,) if options.recompute == "auto" else ())
        self.meshes = {size: logical_meshes(cluster, size, max_axes=2) for size in sizes}
        self._cut_for, self._terms, self._cluster, self._options = cut_for, terms, cluster, options
        self._kinds: list[int] = []
        self._layers: dict[int, dict[int, tuple[StageProgram, list[Tasks]]]] = {}
        self._known: dict[int, dict[int, _Sharded]] = {}
        self._seconds_on: dict[int, dict[int, float]] = {}
        self._batch_sizes, self._counts = batch_sizes, counts
        self._reference = counts[len(counts) // 2]
        self._report = self._whole_report = report

    def shard_on(self, sizes: Iterable[int]) -> None:
        """Shard every distinct layer on every mesh of these submeshes, for the number of microbatches that divides best,
        unless that was done before."""
        middle, places = len(self._counts) // 2, [*self.meshes]
        for size in sizes:
            if not self.is_bound(size):
                continue
            at = places.index(size)
            self._report = part_of(self._whole_report, at / len(places), (at + 1) / len(places))
            ways = [sum(self._ways(size, count)) for count in self._counts]
            best = max(range(len(ways)), key=lambda k: (ways[k], -abs(k - middle)))
            self.solve(size, self._counts[best], within=False)
        self._report = part_of(self._whole_report, 1.0, 1.0)

    def has_bounds(self) -> bool:
        """Whether the step can be cut into layers, so that bounds by their kernels are known; this is cheap."""
        with contextlib.suppress(AutoparError):
            self._layers_for(self._reference)
        return bool(self._kinds)

    def is_bound(self, size: int) -> bool:
        """Whether the costs on a submesh are still lower bounds by kernels."""
        return size not in self._known

    def _ways(self, size: int, count: int) -> tuple[int, ...]:
        """For each batch argument, the largest number of devices that divides both `size` and a microbatch's samples."""
        return tuple(math.gcd(samples // count, size) for samples in self._batch_sizes)

    def of(self, size: int, count: int) -> tuple[int, Costs]:
        """The number of microbatches that was solved for, and costs.

        For a submesh that no layer was sharded on, lower bounds.
        """
        if self.is_bound(size):
            of_kind = self._kernels_alone(size, count)
            return count, [[of_kind[kind] for kind in self._kinds] for _ in self.meshes[size]]
        known = self._known[size]
        alike = [c for c in known if self._ways(size, c) == self._ways(size, count)]
        solved_for = min(alike or known, key=lambda c: (not known[c].fits, abs(math.log(c / count)), c))
        return solved_for, known[solved_for].costs

    def is_beyond(self, size: int, count: int) -> bool:
        """Whether costs on a submesh are those of layers of which some exceed memory: within it, none is faster."""
        return not self.is_bound(size) and not self._known[size][self.of(size, count)[0]].fits

    def stretch(self, size: int, solved_for: int, count: int) -> np.ndarray:
        """Per layer, the ratio of its kernels' seconds per microbatch with `count` microbatches to those with `solved_for`.

        To a device, smaller microbatches are like the same ones on proportionally more devices.
        """
        if solved_for == count:
            return np.ones(self.num_layers)
        before, after = (self._kernels(size * c / self._reference) for c in (solved_for, count))
        return np.array([after[kind] / before[kind] if before[kind] else solved_for / count for kind in self._kinds])

    def _kernels_alone(self, size: int, count: int) -> dict[int, tuple[LayerCost, ...]]:
        """Kind of layer -> lower bound by its kernels, at every level."""
        levels, kernels = len(self.levels), self._kernels(size * count / self._reference)
        return {kind: (LayerCost(seconds, 0.0, 0.0, 0.0, 0.0, 0.0),) * levels for kind, seconds in kernels.items()}

    def _kernels(self, num_devices: float) -> dict[int, float]:
        """Kind of layer -> seconds of its kernels on so many devices.

        Interpolated between powers of 4; less than one device (one with larger microbatches) is extrapolated from 4 and 1.
        """
        place = math.log(num_devices, 4)
        power = max(0, math.floor(place))
        part = place - power
        low = self._kernels_on(4**power)
        high = self._kernels_on(4 ** (power + 1)) if part else low
        return {k: low[k] ** (1 - part) * high[k] ** part if low[k] and high[k] else 0.0 for k in low}

    @functools.cached_property
    def _weights(self) -> LayerKernels:
        return LayerKernels(self._cut_for(self._reference), self._borders, self._cluster.device)

    def _kernels_on(self, num_devices: int) -> dict[int, float]:
        if num_devices not in self._seconds_on:
            of_kinds = {k: self._weights.seconds(self._borders[k], num_devices) for k in dict.fromkeys(self._kinds)}
            self._seconds_on[num_devices] = of_kinds
        return self._seconds_on[num_devices]

    def is_guess(self, size: int, count: int) -> bool:
        """Whether costs on a submesh are bounds, are scaled from samples that divide differently over its devices, or are
        those of layers that do not fit."""
        if self.is_bound(size):
            return True
        return self.is_beyond(size, count) or self._ways(size, self.of(size, count)[0]) != self._ways(size, count)

    def refine(self, size: int, count: int) -> None:
        """Shard every layer for a number of microbatches; if that was done before, within memory."""
        if self.is_bound(size):
            self.shard_on([size])
        else:
            self.solve(size, count, within=count in self._known[size])

    def solve(self, size: int, count: int, within: bool = True) -> None:
        """Shard every layer on every mesh of a submesh, for a number of microbatches, `within` the memory budget or without
        one."""
        try:
            layers = self._layers_for(count)
            restrict = restrict_stages(self._cut_for(count), self._options.constraints)
        except AutoparError:
            nothing: Costs = [[None] * self.num_layers for _ in self.meshes[size]]
            self._known.setdefault(size, {})[count] = _Sharded(nothing, fits=True)
            return
        found, all_fit = Costs(), True
        for number, mesh in enumerate(self.meshes[size]):
            text = f"sharding {len(layers)} kinds of layers on {mesh}, {count} microbatches"
            self._report(text, number / len(self.meshes[size]))
            costs: dict[int, tuple[LayerCost, ...] | None] = {}
            for kind, (program, tasks) in layers.items():
                costs[kind], fits = self._cost(program, tasks, mesh, restrict, within)
                all_fit &= fits
            found.append([costs[kind] for kind in self._kinds])
        self._known.setdefault(size, {})[count] = _Sharded(found, all_fit)

    def _cost(
        self, program: StageProgram, tasks: Sequence[Tasks], mesh: LogicalMesh, restrict: RestrictStage, within: bool
    ) -> tuple[tuple[LayerCost, ...] | None, bool]:
        """The costs of one layer on one mesh, at each level; and whether it fits memory."""
        further, key = restrict(program, mesh)
        own = dataclasses.replace(self._terms, gap=TUNING.layer_gap)
        endless = dataclasses.replace(own, options=dataclasses.replace(own.options, memory_budget_bytes=math.inf))

        def solve(terms: Terms) -> StagePlan:
            return lowered(solve_stage(program, mesh, terms, further, key), self._cluster.device)

        try:
            made = solve(endless)
        except (InfeasibleError, ConstraintError):
            return None, True
        fits = peak_bytes_here(made) <= own.budget_bytes
        if within and not fits:
            # A layer for which nothing is found is told by its bytes: in a stage with others it may fit.
            with contextlib.suppress(InfeasibleError):
                made = solve(own)
            fits = True
        others = [lower_stage(with_tasks(program, t), self._cluster.device, made.sharded) for t in tasks[1:]]
        return tuple(_cost(stage, t) for stage, t in zip((made, *others), tasks, strict=True)), fits

    def _layers_for(self, count: int) -> dict[int, tuple[StageProgram, list[Tasks]]]:
        """Kind of layer -> program of the first such layer, and its tasks at each level."""
        if count not in self._layers:
            cut = self._cut_for(count)
            levels = [self.levels[0]] * self.num_layers
            tasks = make_tasks(cut, self._borders, levels=levels)
            # Layers that are equal for one number of microbatches are so for all.
            restrict = restrict_stages(cut, self._options.constraints)
            layers = [stage_program(tasks, layer) for layer in range(self.num_layers)] if not self._kinds else []
            self._kinds = self._kinds or _first_alike(layers, restrict)
            self._layers[count] = {
                kind: (stage_program(tasks, kind), [tasks, *(tasks.at_level(kind, level) for level in self.levels[1:])])
                for kind in dict.fromkeys(self._kinds)
            }
        return self._layers[count]


def _first_alike(programs: Sequence[StageProgram], restrict: RestrictStage) -> list[int]:
    """For each program, the index of the first one that is equal and has the same pins."""
    first: dict[Hashable, int] = {}
    anywhere = LogicalMesh((1,))
    keys = [(canonical_key(program.jaxpr), restrict(program, anywhere)[1]) for program in programs]
    return [first.setdefault(key, k) for k, key in enumerate(keys)]


def _cost(stage: StagePlan, tasks: Tasks) -> LayerCost:
    work = fixed = once = exposed = 0.0
    kept, working = kept_bytes(tasks, stage), 0
    held: dict[object, int] = {}
    for task in stage.tasks:
        # Values read besides residuals come from other stages, for one microbatch at a time.
        read = sum(b.num_bytes for b in task.inputs if b.kind == "loop")
        working = max(working, task.working_bytes + max(0, read - kept))
        for border in (*task.inputs, *task.outputs):
            if border.kind in RESIDENT:
                held[border.kind, border.key] = border.num_bytes
        if task.task.is_in_loop:
            latency = sum(c.times * collective_seconds(c.kind, 0, c.axes, stage.mesh) for c in task.collectives)
            waiting = min(latency, sum(task.exposed_seconds))
            same = waiting + task.batchless_seconds
            fixed += same
            work += task.seconds - same
            exposed += sum(task.exposed_seconds) - waiting
        else:
            once += task.seconds
    return LayerCost(work, fixed, once, float(sum(held.values())), float(kept), float(working), exposed)


def submesh_sizes(cluster: Cluster) -> list[int]:
    """Numbers of devices that a stage may have: divisors of a host's, or whole hosts that divide the cluster; not all."""
    inside = [n for n in range(1, cluster.devices_per_host + 1) if cluster.devices_per_host % n == 0]
    hosts = [n * cluster.devices_per_host for n in range(2, cluster.hosts + 1) if cluster.hosts % n == 0]
    return [n for n in (*inside, *hosts) if n < cluster.num_devices]
