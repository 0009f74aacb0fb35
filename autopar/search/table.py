"""The stage table: what a stage of given layers on a given submesh takes, in seconds and in microbatches it can hold.

In:     costs of layers (`layer_costs.py`).
Out:    `Kinds`: for one number of microbatches, seconds and memory of every stage; `equal_stages`: of stages that share the
        work evenly, however many, which may begin inside a layer.
Method: a stage's cost is the sum of its layers', or of parts of them. A stage that runs its forward pass again is one more
        kind of stage, slower and smaller: it is sharded alike, so this costs no solving.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autopar.inter_op.residuals import ALL
from autopar.mesh import LogicalMesh
from autopar.search.layer_costs import LayerCost, LayerCosts


@dataclass(frozen=True, slots=True, eq=False)
class Kinds:
    """Kinds of stages, for one number of microbatches: a size of submesh and a level of recomputation each.

    Attributes:
        sizes: Devices of each kind.
        seconds: `[first, last, kind]`, of one microbatch; inf: does not fit.
        least: The same, if all communication were hidden that could be.
        flight: `[first, last, kind]`: how many microbatches the memory holds at once.
        meshes: (first, last, kind) -> the logical mesh that this is on.
    """

    sizes: list[int]
    seconds: np.ndarray
    least: np.ndarray
    flight: np.ndarray
    meshes: dict[tuple[int, int, int], LogicalMesh]

    def first(self, num_kinds: int) -> Kinds:
        """The first of these kinds only."""
        own = slice(num_kinds)
        return Kinds(self.sizes[own], self.seconds[..., own], self.least[..., own], self.flight[..., own], self.meshes)


@dataclass(frozen=True, slots=True, eq=False)
class _Costs:
    """Costs of layers on one mesh at one level of recomputation, arrays over layers; NaN: does not fit.

    Attributes:
        seconds: Of one microbatch.
        least: If all communication were hidden that could be.
        resident: Bytes on one device, all through the step.
        kept: For each microbatch in flight.
        working: While it runs.
        plain_kept: What it would keep, and
        plain_working: work with, if only what is cheap ran again.
        again: Whether all of a stage may be recomputed at once, from its input alone.
        budget: Bytes of one device; inf: these layers are larger than memory, and how they would be sharded within it is not
            known yet.
    """

    seconds: np.ndarray
    least: np.ndarray
    resident: np.ndarray
    kept: np.ndarray
    working: np.ndarray
    plain_kept: np.ndarray
    plain_working: np.ndarray
    again: bool
    budget: float


def _costs(layers: LayerCosts, count: int, budget: float) -> Iterator[tuple[int, int, LogicalMesh, _Costs]]:
    """(size, level, mesh, costs of all layers there) for so many microbatches."""
    for level, what in enumerate(layers.levels):
        for size in layers.meshes:
            solved_for, of_meshes = layers.of(size, count)
            scale, stretch = solved_for / count, layers.stretch(size, solved_for, count)
            for mesh, of_layers in zip(layers.meshes[size], of_meshes, strict=True):
                rows = [
                    (np.nan,) * 7 if cost is None else _row(cost[level], cost[0], longer, scale, count)
                    for cost, longer in zip(of_layers, stretch, strict=True)
                ]
                seconds, least, resident, kept, working, plain_kept, plain_working = np.array(rows).T
                again = what == ALL and len(layers.levels) > 1
                room = math.inf if layers.is_beyond(size, count) else budget
                of_mesh = _Costs(seconds, least, resident, kept, working, plain_kept, plain_working, again, room)
                yield size, level, mesh, of_mesh


def _row(cost: LayerCost, plain: LayerCost, longer: float, scale: float, count: int) -> tuple[float, ...]:
    """What `_Costs` says of one layer."""
    seconds = cost.work_seconds * longer + cost.fixed_seconds + cost.once_seconds / count
    least = seconds - cost.exposed_seconds * longer
    bytes_now = cost.resident_bytes, cost.kept_bytes * scale, cost.working_bytes * scale
    return seconds, least, *bytes_now, plain.kept_bytes * scale, plain.working_bytes * scale


def _holds(
    costs: _Costs, share: np.ndarray, first: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seconds of stages for one microbatch (and at least), and how many their memory holds; of those at most `count`.

    Args:
        costs: Of layers.
        share: `[stage, layer]`: how much of each layer is in a stage.
        first: `[stage]`: the layer that a stage begins with, whose input it keeps where all else is recomputed.
        count: Number of microbatches.
    """
    inside = share > 0
    fits = ~(inside & np.isnan(costs.seconds)).any(1)

    def total(values: np.ndarray) -> np.ndarray:
        return share @ np.nan_to_num(values)

    def most(values: np.ndarray) -> np.ndarray:
        return np.where(inside, np.nan_to_num(values), 0.0).max(1)

    room = costs.budget - total(costs.resident)

    def flight(kept: np.ndarray, working: np.ndarray) -> np.ndarray:
        left = room - working
        some = np.divide(left, kept, out=np.full(len(left), np.inf), where=(kept > 0) & np.isfinite(left))
        return np.where(left < 0, 0, np.minimum(count, np.floor(np.clip(some, 0, count))))

    in_flight = flight(total(costs.kept), most(costs.working))
    if costs.again:
        once = total(costs.plain_kept) + most(costs.plain_working)
        in_flight = np.maximum(in_flight, flight(np.nan_to_num(costs.kept)[first], once))
    fits &= in_flight >= 1
    seconds, least = (np.where(fits, total(values), np.inf) for values in (costs.seconds, costs.least))
    return seconds, least, np.where(fits, in_flight, 0)


def kinds_of(layers: LayerCosts, count: int, budget: float) -> Kinds:
    """Seconds and memory of all stages, each on its fastest mesh."""
    num_layers = layers.num_layers
    firsts, lasts = np.triu_indices(num_layers)
    at = np.arange(num_layers)
    share = ((firsts[:, None] <= at) & (at <= lasts[:, None])).astype(float)
    kinds = [(level, size) for level in range(len(layers.levels)) for size in layers.meshes]
    seconds = np.full((num_layers, num_layers, len(kinds)), np.inf)
    least, flight = seconds.copy(), np.zeros(seconds.shape)
    chosen: dict[tuple[int, int, int], LogicalMesh] = {}
    for size, level, mesh, costs in _costs(layers, count, budget):
        number = kinds.index((level, size))
        times, lower, holds = _holds(costs, share, firsts, count)
        for k in np.flatnonzero(times < seconds[firsts, lasts, number]):
            place = int(firsts[k]), int(lasts[k]), number
            seconds[place], least[place], flight[place], chosen[place] = times[k], lower[k], holds[k], mesh
    # No stage runs all again that holds as many microbatches as there can be stages behind it without.
    enough = np.minimum(count, num_layers - np.arange(num_layers))[:, None, None]
    plain = len(layers.meshes)
    for level in range(1, len(layers.levels)):
        seconds[..., level * plain : (level + 1) * plain][flight[..., :plain] >= enough] = np.inf
    return Kinds([size for _, size in kinds], seconds, least, flight, chosen)


def equal_stages(
    layers: LayerCosts, size: int, num_stages: int, count: int, budget: float
) -> Iterator[tuple[np.ndarray, np.ndarray, LogicalMesh]]:
    """Seconds (and at least) of so many stages of equal work for one microbatch, all on one mesh of `size` devices, where they
    fit under 1F1B.
    """
    end = np.cumsum(layers.work) / layers.work.sum()
    begin = np.append(0.0, end[:-1])
    borders = np.arange(num_stages + 1) / num_stages
    inside = np.minimum(end, borders[1:, None]) - np.maximum(begin, borders[:-1, None])
    share = np.clip(inside / np.maximum(end - begin, 1e-12), 0.0, 1.0)
    share[share < 1e-9] = 0.0
    # What has next to no work is where its neighbour is.
    share[np.minimum(np.searchsorted(borders[1:], begin, side="right"), num_stages - 1), np.arange(len(end))] += (
        1 - share.sum(0)
    )
    first = np.argmax(share > 0, axis=1)
    behind = np.minimum(count, num_stages - np.arange(num_stages))
    best: dict[LogicalMesh, tuple[np.ndarray, np.ndarray]] = {}
    for of_size, _, mesh, costs in _costs(layers, count, budget):
        if of_size == size:
            times, lower, holds = _holds(costs, share, first, count)
            times = np.where(holds >= behind, times, np.inf)
            before = best.get(mesh, (np.full(num_stages, np.inf),) * 2)
            best[mesh] = np.minimum(before[0], times), np.where(times < before[0], lower, before[1])
    for mesh, (times, lower) in best.items():
        if np.isfinite(times).all():
            yield times, lower, mesh
