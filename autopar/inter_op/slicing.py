"""Cuts a chain of layers into stages and gives each stage a submesh.

In:     stage_seconds[first, last, submesh], float64 seconds of one microbatch, inf = does not fit; the submeshes' sizes.
Out:    `Slicing`: the stages of least pipeline latency.
Method: dynamic programming over (stages left, first layer, devices left) for each bound on the slowest stage;
        latency = sum of stages + (microbatches - 1) * slowest + transfers at the borders;
        Zheng et al., "Alpa", OSDI 2022, sec. 5.2, eq. 3. All devices are used. Under 1F1B the k-th stage from the end
        holds k microbatches in flight, which its memory must allow.
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
        latency_seconds: Latency of one step, all microbatches.
        stages: The stages, in order.
    """

    latency_seconds: float
    stages: tuple[SlicedStage, ...]


def slice_stages(
    stage_seconds: np.ndarray,
    submesh_sizes: Sequence[int],
    num_devices: int,
    num_microbatches: int,
    *,
    transfer_seconds: np.ndarray,
    max_in_flight: np.ndarray,
    gap: float = 0.0,
) -> Slicing:
    """Find the slicing of least latency.

    Args:
        stage_seconds: `[first, last, submesh]`: seconds that layers first..last need for one microbatch, forward and
            backward; inf where they do not fit; entries with last < first are not read.
        submesh_sizes: Devices of each kind of submesh.
        num_devices: Number of devices, all of which are used.
        num_microbatches: Number of microbatches.
        transfer_seconds: `[layer]`: seconds per microbatch of the transfers over the border before that layer, both
            ways; entry 0 is not read.
        max_in_flight: `[first, last, submesh]`: number of microbatches that the stage's memory holds at once.
        gap: Bounds on the slowest stage within this fraction of each other are tried as one; 0: the exact optimum.

    Raises:
        InfeasibleError: No slicing uses all devices and fits.
    """
    seconds = np.array(stage_seconds, dtype=float)
    num_layers = seconds.shape[0]
    seconds[np.tril(np.ones((num_layers, num_layers), bool), -1)] = np.inf
    # Devices are counted in the largest unit that divides all: whole hosts, or many of them.
    unit = math.gcd(num_devices, *submesh_sizes)
    sizes, total = np.array(submesh_sizes) // unit, num_devices // unit
    search = _Search(seconds, sizes, total, np.array(transfer_seconds, float), max_in_flight, num_microbatches)
    unbounded = search.least(np.inf)
    if unbounded is None:
        raise InfeasibleError(
            "no slicing into stages fits.",
            given=f"{num_layers} layers, submeshes of {list(submesh_sizes)} devices, {num_devices} devices",
            wrong="no stages that fit use all devices.",
            do="allow more kinds of submeshes, or raise the memory budget.",
            constraint="stages",
        )
    return search.best(unbounded, gap)


@dataclass(frozen=True, slots=True, eq=False)
class _Search:
    """The dynamic program; attributes as in `slice_stages`: `border` is `transfer_seconds`, `limits` `max_in_flight`."""

    seconds: np.ndarray
    sizes: np.ndarray
    num_devices: int
    border: np.ndarray
    limits: np.ndarray
    num_microbatches: int

    def latency(self, stages: Sequence[SlicedStage]) -> float:
        times = [float(self.seconds[s.first, s.last, s.submesh]) for s in stages]
        crossing = sum(float(self.border[s.first]) for s in stages[1:])
        return sum(times) + (self.num_microbatches - 1) * max(times) + crossing

    def best(self, unbounded: tuple[float, tuple[SlicedStage, ...]], gap: float) -> Slicing:
        """The slicing of least latency, over all bounds on the slowest stage; `unbounded`: the slicing of least sum."""
        least_sum, stages = unbounded
        best = Slicing(self.latency(stages), stages)
        tried = -np.inf
        for bound in self.feasible_bounds(gap):
            # Lower bound on the latency of slicings whose slowest stage takes at least `bound`.
            if least_sum + (self.num_microbatches - 1) * bound >= best.latency_seconds:
                break
            if bound <= tried * (1 + gap):
                continue
            tried = bound
            found = self.least(float(bound) * (1 + gap))
            if found is not None:
                latency = self.latency(found[1])
                if latency < best.latency_seconds:
                    best = Slicing(latency, found[1])
        return best

    def feasible_bounds(self, gap: float) -> np.ndarray:
        """Ascending bounds on the slowest stage, from the least feasible one, which is found by bisection."""
        bounds = np.unique(self.seconds[np.isfinite(self.seconds)])
        low, high = 0, len(bounds) - 1
        while low < high:
            middle = (low + high) // 2
            fits = self.least(float(bounds[middle]) * (1 + gap)) is not None
            low, high = (low, middle) if fits else (middle + 1, high)
        return bounds[low:]

    def least(self, bound: float) -> tuple[float, tuple[SlicedStage, ...]] | None:
        """The slicing of least sum whose stages all take at most `bound`; None: there is none.

        After k iterations, best[first, devices left] is over slicings of the layers from `first` into k stages, the first
        of which holds k microbatches in flight.
        """
        layers, rows = self.seconds.shape[0], self.num_devices + 1
        before = np.full((layers + 1, rows), np.inf)
        before[layers, 0] = 0.0
        steps: list[np.ndarray] = []
        answer: tuple[float, int] | None = None
        under_bound = [self.stages(first, bound) for first in range(layers)]
        for behind in range(1, min(layers, self.num_devices // int(self.sizes.min())) + 1):
            best = np.full(before.shape, np.inf)
            came = np.zeros((layers, rows, 2), int)
            in_flight = min(behind, self.num_microbatches)
            for first, (stages, costs, limits) in enumerate(under_bound):
                fits = limits >= in_flight
                if not fits.all():
                    stages, costs = stages[fits], costs[fits]
                best[first], came[first] = self.first_stage(before, stages, costs)
            steps.append(came)
            value = float(best[0, -1])
            if np.isfinite(value) and (answer is None or value < answer[0]):
                answer = value, behind
            before = best
        if answer is None:
            return None
        chosen: list[SlicedStage] = []
        first, left = 0, self.num_devices
        for came in reversed(steps[: answer[1]]):
            last, submesh = (int(x) for x in came[first, left])
            chosen.append(SlicedStage(first, last, submesh))
            first, left = last + 1, left - int(self.sizes[submesh])
        return answer[0], tuple(chosen)

    def stages(self, first: int, bound: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Stages (last layer, submesh) that begin at a layer and take at most `bound`, with their costs and their limits on
        microbatches in flight."""
        times = self.seconds[first]
        fits = np.isfinite(times) & (times <= bound)
        found = np.argwhere(fits)
        following = np.append(self.border, 0.0)[found[:, 0] + 1]
        return found, times[fits] + following, self.limits[first][fits]

    def first_stage(
        self, following: np.ndarray, stages: np.ndarray, costs: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """For each number of devices left, the least cost of a stage plus the stages after it, and that stage.

        `following`: `[first, left]`. `stages`: `[stage, (last, submesh)]`.
        """
        rows = np.arange(following.shape[1])
        if not len(stages):
            return np.full(len(rows), np.inf), np.zeros((len(rows), 2), int)
        after = rows - self.sizes[stages[:, 1:]]
        if not np.isfinite(
            following[int(stages[0, 0]) + 1 :]
        ).any():  # stages are in order of last layer: none can follow
            return np.full(len(rows), np.inf), np.repeat(stages[:1], len(rows), axis=0)
        totals = following[stages[:, :1] + 1, np.maximum(after, 0)] + costs[:, None]
        totals[after < 0] = np.inf
        which = totals.argmin(axis=0)
        return totals[which, rows], stages[which]
