"""The stage table: seconds of a stage of given layers on a given submesh, and the microbatches that it can hold.

In:     costs of layers (`layer_costs.py`).
Out:    `Kinds`: for one number of microbatches, seconds and memory of every stage; `equal_stages`: those of stages with equal
        work, which may begin inside a layer.
Method: a stage's cost is the sum over its layers, or fractions of them. A stage that recomputes its forward pass is another
        kind of stage, slower and smaller; it is sharded alike, so that no further solving is needed.
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
        sizes: Number of devices of each kind.
        seconds: `[first, last, kind]`: seconds of one microbatch; inf: does not fit.
        least: The same with all communication hidden that may be.
        flight: `[first, last, kind]`: number of microbatches that the memory holds at once.
        meshes: (first, last, kind) -> the logical mesh of the stage.
    """

    sizes: list[int]
    seconds: np.ndarray
    least: np.ndarray
    flight: np.ndarray
    meshes: dict[tuple[int, int, int], LogicalMesh]

    def first(self, num_kinds: int) -> Kinds:
        """The first `num_kinds` kinds."""
        own = slice(num_kinds)
        return Kinds(self.sizes[own], self.seconds[..., own], self.least[..., own], self.flight[..., own], self.meshes)


@dataclass(frozen=True, slots=True, eq=False)
class _Costs:
    """Costs of layers on one mesh at one recomputation level: arrays over layers; NaN: does not fit. Bytes of one device.

    Attributes:
        seconds: Seconds of one microbatch.
        least: The same with all communication hidden that may be.
        resident: Bytes held throughout the step.
        kept: Bytes of residuals per microbatch in flight.
        working: Further bytes while the layer runs.
        plain_kept: `kept` at the first level, without recomputation beyond that.
        plain_working: `working` at the first level.
        again: Whether a whole stage may be recomputed from its input alone.
        budget: Memory budget, bytes; inf: these layers exceed memory, and were not sharded within it yet.
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
    """(submesh size, index of the level, mesh, costs of all layers) for so many microbatches."""
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
    """The entries of `_Costs` for one layer."""
    seconds = cost.work_seconds * longer + cost.fixed_seconds + cost.once_seconds / count
    least = seconds - cost.exposed_seconds * longer
    bytes_now = cost.resident_bytes, cost.kept_bytes * scale, cost.working_bytes * scale
    return seconds, least, *bytes_now, plain.kept_bytes * scale, plain.working_bytes * scale


def _holds(
    costs: _Costs, share: np.ndarray, first: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seconds of stages for one microbatch, a lower bound on them, and the microbatches that they hold, at most `count`.

    Args:
        costs: Costs of layers.
        share: `[stage, layer]`: fraction of the layer that is in the stage.
        first: `[stage]`: its first layer, whose input it keeps if all else is recomputed.
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
    # Drop recomputing kinds where the plain one holds as many microbatches as can be in flight.
    enough = np.minimum(count, num_layers - np.arange(num_layers))[:, None, None]
    plain = len(layers.meshes)
    for level in range(1, len(layers.levels)):
        seconds[..., level * plain : (level + 1) * plain][flight[..., :plain] >= enough] = np.inf
    return Kinds([size for _, size in kinds], seconds, least, flight, chosen)


def equal_stages(
    layers: LayerCosts, size: int, num_stages: int, count: int, budget: float
) -> Iterator[tuple[np.ndarray, np.ndarray, LogicalMesh]]:
    """For each mesh of `size` devices on which stages of equal work fit under 1F1B: their seconds for one microbatch, lower
    bounds on these, and the mesh."""
    end = np.cumsum(layers.work) / layers.work.sum()
    begin = np.append(0.0, end[:-1])
    borders = np.arange(num_stages + 1) / num_stages
    inside = np.minimum(end, borders[1:, None]) - np.maximum(begin, borders[:-1, None])
    share = np.clip(inside / np.maximum(end - begin, 1e-12), 0.0, 1.0)
    share[share < 1e-9] = 0.0
    # Layers with next to no work go where their neighbour is.
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
