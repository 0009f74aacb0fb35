"""The stage table: what a stage of given layers on a given submesh takes, in seconds and in microbatches it can hold.

In:     costs of layers (`layer_costs.py`).
Out:    `Kinds`: for one number of microbatches, seconds and memory of every stage.
Method: a stage's cost is the sum of its layers'. A stage that runs its forward pass again is one more kind of stage,
        slower and smaller: it is sharded alike, so this costs no solving.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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


def kinds_of(layers: LayerCosts, count: int, budget: float) -> Kinds:
    """Seconds and memory of all stages, each on its fastest mesh.

    Args:
        layers: Costs of layers.
        count: Number of microbatches.
        budget: Bytes of one device.
    """
    num_layers = layers.num_layers
    kinds = [(size, level) for level in range(len(layers.levels)) for size in layers.meshes]
    seconds = np.full((num_layers, num_layers, len(kinds)), np.inf)
    flight = np.zeros(seconds.shape)
    chosen: dict[tuple[int, int, int], LogicalMesh] = {}
    for number, (size, level) in enumerate(kinds):
        solved_for, of_meshes = layers.of(size, count)
        for mesh, of_layers in zip(layers.meshes[size], of_meshes, strict=True):
            for first in range(num_layers):
                for last in range(first, num_layers):
                    costs = of_layers[last]
                    if costs is None:
                        break
                    members = [layer for layer in of_layers[first : last + 1] if layer is not None]
                    again = layers.levels[level] == ALL and len(layers.levels) > 1
                    time, fits = _stage(members, level, again, solved_for, count, budget)
                    if fits >= 1 and time < seconds[first, last, number]:
                        seconds[first, last, number] = time
                        flight[first, last, number] = fits
                        chosen[first, last, number] = mesh
    # No stage runs all again that holds as many microbatches as there can be stages behind it without.
    enough = np.minimum(count, num_layers - np.arange(num_layers))[:, None, None]
    plain = len(layers.meshes)
    for level in range(1, len(layers.levels)):
        seconds[..., level * plain : (level + 1) * plain][flight[..., :plain] >= enough] = np.inf
    return Kinds([size for size, _ in kinds], seconds, flight, chosen)


def _stage(
    layers: Sequence[tuple[LayerCost, ...]], level: int, again: bool, solved_for: int, count: int, budget: float
) -> tuple[float, int]:
    """Seconds of a stage for one microbatch, and how many microbatches its memory holds; of those not more than `count`.

    Where everything runs `again`, either each layer's input is kept, or the stage's, and all that its forward pass makes
    is there once.
    """
    scale = solved_for / count
    costs = [layer[level] for layer in layers]
    time = sum(c.work_seconds * scale + c.fixed_seconds + c.once_seconds / count for c in costs)
    room = budget - sum(c.held_bytes for c in costs)

    def fits(kept: float, working: float) -> int:
        left = room - working * scale
        if left < 0:
            return 0
        return min(count, math.floor(left / (kept * scale))) if kept and math.isfinite(left) else count

    most = fits(sum(c.kept_bytes for c in costs), max(c.working_bytes for c in costs))
    if again:
        once = sum(layer[0].kept_bytes for layer in layers) + max(layer[0].working_bytes for layer in layers)
        most = max(most, fits(costs[0].kept_bytes, once))
    return time, most
