"""Stage slicing: cut a chain of layers into stages and give each stage a submesh.

In:     stage_seconds[first, last, submesh], float64 seconds of one microbatch, inf = does not fit; the submeshes' sizes.
Out:    `Slicing`: the stages of least pipeline latency.
Method: dynamic programming over (stages left, first layer, devices left) for each bound on the slowest stage;
        latency = sum of stages + (microbatches - 1) * slowest + transfers at the borders;
        Zheng et al., "Alpa", OSDI 2022, sec. 5.2, eq. 3. All devices are used. A stage with k stages from it to the end
        holds k microbatches in flight under 1F1B, which its memory must allow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.errors import InfeasibleError


@dataclass(frozen=True, slots=True)
class SlicedStage:
    """Layers `first` to `last`, both included, on a submesh of kind `submesh`."""

    first: int
    last: int
    submesh: int


@dataclass(frozen=True, slots=True)
class Slicing:
    """Stages of a pipeline.

    Attributes:
        latency_seconds: Of one step of all microbatches.
        stages: In order.
    """

    latency_seconds: float
    stages: tuple[SlicedStage, ...]


def slice_stages(
    stage_seconds: np.ndarray,
    submesh_sizes: Sequence[int] | Sequence[Sequence[int]],
    num_devices: int | Sequence[int],
    num_microbatches: int,
    *,
    transfer_seconds: np.ndarray | None = None,
    max_in_flight: np.ndarray | None = None,
    gap: float = 0.0,
) -> Slicing:
    """The slicing of least latency.

    Args:
        stage_seconds: `[first, last, submesh]`: seconds that layers first..last need for one microbatch, forward and
            backward; inf where they do not fit; entries with last < first are not read.
        submesh_sizes: Devices of each kind of submesh; with several kinds of devices, how many of each kind.
        num_devices: Devices, all of which are used; with several kinds, how many of each.
        num_microbatches: m.
        transfer_seconds: `[layer]`: seconds per microbatch to bring what crosses the border before that layer over it,
            there and back; entry 0 is not read.
        max_in_flight: `[first, last, submesh]`: how many microbatches the stage's memory holds at once.
        gap: Bounds on the slowest stage that differ by less than this part are tried as one; 0: the exact optimum.

    Raises:
        InfeasibleError: No slicing uses all devices and fits.
    """
    seconds = np.array(stage_seconds, dtype=float)
    sizes = [tuple(s) if isinstance(s, Sequence) else (int(s),) for s in submesh_sizes]
    total = tuple(num_devices) if isinstance(num_devices, Sequence) else (int(num_devices),)
    given = sizes, total
    sizes, total = _in_units(sizes, total)
    num_layers = seconds.shape[0]
    lower = np.tril(np.ones((num_layers, num_layers), bool), -1)
    seconds[lower] = np.inf
    border = np.zeros(num_layers) if transfer_seconds is None else np.array(transfer_seconds, dtype=float)
    limits = None if max_in_flight is None else np.array(max_in_flight, dtype=float)
    search = _Search(seconds, sizes, total, border, limits, num_microbatches)
    bounds = np.unique(seconds[np.isfinite(seconds)])
    free = search.least(np.inf)
    if free is None:
        raise InfeasibleError(
            "no slicing into stages fits.",
            given=f"{num_layers} layers, submeshes of {[s[0] if len(s) == 1 else s for s in given[0]]} devices, "
            f"{given[1][0] if len(total) == 1 else given[1]} devices",
            wrong="no stages that fit use all devices.",
            do="allow more kinds of submeshes, or raise the memory budget.",
            constraint="stages",
        )
    best = Slicing(search.latency(free[1]), free[1])
    tried = -np.inf
    # Below some bound nothing fits: the first above is found by halving.
    low, high = 0, len(bounds) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if search.least(float(bounds[middle]) * (1 + gap)) is None else (low, middle)
    for bound in bounds[low:]:
        # No slicing under a larger bound whose slowest stage comes near it can be better than this.
        if free[0] + (num_microbatches - 1) * bound >= best.latency_seconds:
            break
        if bound <= tried * (1 + gap):
            continue
        tried = bound
        found = search.least(float(bound) * (1 + gap))
        if found is not None:
            latency = search.latency(found[1])
            if latency < best.latency_seconds:
                best = Slicing(latency, found[1])
    return best


def _in_units(
    sizes: Sequence[tuple[int, ...]], total: tuple[int, ...]
) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """Sizes and devices counted in the largest units that divide them all: whole hosts, or many of them."""
    units = [math.gcd(n, *(size[kind] for size in sizes)) or 1 for kind, n in enumerate(total)]
    return [tuple(n // u for n, u in zip(s, units, strict=True)) for s in sizes], tuple(
        n // u for n, u in zip(total, units, strict=True)
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Search:
    seconds: np.ndarray
    sizes: Sequence[tuple[int, ...]]
    total: tuple[int, ...]
    border: np.ndarray
    limits: np.ndarray | None
    num_microbatches: int

    @property
    def most_stages(self) -> int:
        """So many at least as all devices can make."""
        of_kind = [
            n // min((s[kind] for s in self.sizes if s[kind]), default=n + 1) for kind, n in enumerate(self.total)
        ]
        return sum(of_kind)

    def latency(self, stages: Sequence[SlicedStage]) -> float:
        times = [float(self.seconds[s.first, s.last, s.submesh]) for s in stages]
        crossing = sum(float(self.border[s.first]) for s in stages[1:])
        return sum(times) + (self.num_microbatches - 1) * max(times) + crossing

    def least(self, bound: float) -> tuple[float, tuple[SlicedStage, ...]] | None:
        """The slicing of least sum whose stages all take at most `bound`."""
        return self.unlimited(bound) if self.limits is None else self.limited(bound)

    def unlimited(self, bound: float) -> tuple[float, tuple[SlicedStage, ...]] | None:
        """best[first, devices left]: however many stages follow."""
        layers, devices = self.seconds.shape[0], _Devices.of(self.sizes, self.total)
        best = np.full((layers + 1, devices.count + 1), np.inf)
        best[layers, 0] = 0.0
        came = np.zeros((layers, devices.count, 2), int)
        for first in range(layers - 1, -1, -1):
            best[first, :-1], came[first] = devices.least(best, *self.stages(first, bound, 0))
        if not np.isfinite(best[0, -2]):
            return None
        stages, first, left = [], 0, devices.count - 1
        while first < layers:
            last, submesh = (int(x) for x in came[first, left])
            stages.append(SlicedStage(first, last, submesh))
            first, left = last + 1, int(devices.source[submesh, left])
        return float(best[0, -2]), tuple(stages)

    def limited(self, bound: float) -> tuple[float, tuple[SlicedStage, ...]] | None:
        """best[stages from here to the end][first, devices left]: so many microbatches are in flight here."""
        layers, devices = self.seconds.shape[0], _Devices.of(self.sizes, self.total)
        most = min(layers, self.most_stages)
        before = np.full((layers + 1, devices.count + 1), np.inf)
        before[layers, 0] = 0.0
        steps: list[np.ndarray] = []
        answer: tuple[float, int] | None = None
        for behind in range(1, most + 1):
            best = np.full(before.shape, np.inf)
            came = np.zeros((layers, devices.count, 2), int)
            for first in range(layers):
                options = self.stages(first, bound, min(behind, self.num_microbatches))
                best[first, :-1], came[first] = devices.least(before, *options)
            steps.append(came)
            value = float(best[0, -2])
            if np.isfinite(value) and (answer is None or value < answer[0]):
                answer = value, behind
            before = best
        if answer is None:
            return None
        stages, first, left = [], 0, devices.count - 1
        for behind in range(answer[1], 0, -1):
            last, submesh = (int(x) for x in steps[behind - 1][first, left])
            stages.append(SlicedStage(first, last, submesh))
            first, left = last + 1, int(devices.source[submesh, left])
        return answer[0], tuple(stages)

    def stages(self, first: int, bound: float, in_flight: int) -> tuple[np.ndarray, np.ndarray]:
        """Stages (last layer, submesh) that begin at a layer, take at most `bound` and hold so many microbatches; and costs."""
        times = self.seconds[first]
        fits = np.isfinite(times) & (times <= bound)
        if self.limits is not None:
            fits &= self.limits[first] >= in_flight
        found = np.argwhere(fits)
        following = np.append(self.border, 0.0)[found[:, 0] + 1]
        return found, times[fits] + following


@dataclass(frozen=True, slots=True, eq=False)
class _Devices:
    """How many devices of each kind are left, as one number; the last entry of a row of costs stands for too few.

    Attributes:
        count: How many such numbers there are.
        source: `[submesh, left]`: what is left after that submesh; `count` where it has more than there are.
    """

    count: int
    source: np.ndarray

    @staticmethod
    def of(sizes: Sequence[tuple[int, ...]], total: tuple[int, ...]) -> _Devices:
        shape = tuple(n + 1 for n in total)
        left = np.stack(np.unravel_index(np.arange(math.prod(shape)), shape), axis=-1)
        after = left[None] - np.array(sizes)[:, None]
        flat = np.ravel_multi_index(tuple(np.moveaxis(np.maximum(after, 0), -1, 0)), shape)
        return _Devices(len(left), np.where((after < 0).any(-1), len(left), flat))

    def least(self, following: np.ndarray, stages: np.ndarray, costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each number of devices left, the least of a stage and what follows, and that stage.

        Args:
            following: `[first, left]`.
            stages: `[stage, (last, submesh)]`.
            costs: Of each.
        """
        if not len(stages):
            return np.full(self.count, np.inf), np.zeros((self.count, 2), int)
        totals = following[stages[:, :1] + 1, self.source[stages[:, 1]]] + costs[:, None]
        which = totals.argmin(axis=0)
        return totals[which, np.arange(self.count)], stages[which]
