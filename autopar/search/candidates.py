"""Finds candidate pipelines by the stage table: stages, their submeshes, the number of microbatches.

In:     costs of layers (`layer_costs.py`), bytes that cross their borders.
Out:    `Candidate`s, best first.
Method: for each number of microbatches, stages of equal work on equal submeshes, and the slicing that the DP of
        `inter_op/slicing.py` finds; ranked under the schedule that is best for them. Layers are sharded only on submeshes
        on which a pipeline may beat the best step known, going by kernels alone. Guessed costs are solved for if they are
        among the best and may beat that step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.errors import InfeasibleError
from autopar.inter_op.slicing import slice_stages
from autopar.mesh import Cluster, LogicalMesh
from autopar.search.layer_costs import LayerCosts
from autopar.search.table import Kinds, equal_stages, kinds_of
from autopar.tuning import TUNING

LEAST_BUBBLE = 0.25
"""Part of 1F1B's bubble that any schedule leaves: interleaved four times a quarter, zero-bubble H1 a third."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """How much a pipeline's bubble counts.

    Attributes:
        calls: Number of calls of the step in a row that do not wait for each other, and share one bubble.
        bubble: Fraction of 1F1B's bubble that the best schedule leaves.
        returns: Whether microbatches come back, through the backward pass.
    """

    calls: int = 1
    bubble: float = 1.0
    returns: bool = True

    def seconds(self, times: np.ndarray, count: int, sent: float = 0.0) -> float:
        """Seconds of a call with `count` microbatches, each of which takes `times` in the stages.

        `sent`: seconds of a microbatch's transfers, there and back. The first stage begins a microbatch when one of as many
        as there are stages is back.
        """
        slowest, whole = float(times.max()), float(times.sum())
        each = max(slowest, (whole + sent) / len(times)) if self.returns else slowest
        return count * each + (self.bubble * (whole - slowest) + sent) / self.calls

    def bound(self, times: np.ndarray, count: int) -> float:
        """The least that this is under any schedule, nothing sent."""
        least = min(self.bubble, LEAST_BUBBLE) if self.returns else self.bubble
        return dataclasses.replace(self, bubble=least).seconds(times, count)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pipeline to be planned.

    Attributes:
        count: Number of microbatches.
        seconds: Its step by the table.
        least: The same with all communication hidden that may be; of kernels alone a bound under any schedule.
        sizes: Number of devices of each stage.
        firsts: First layer of each stage; None: borders are balanced anew, with scans in as many parts as stages.
        meshes: Per stage, the logical meshes to try.
        is_bound: Whether both seconds are of kernels alone: no layer was sharded on these submeshes.
        parts: Number of parts of scans instead of that; 0: not given.
    """

    count: int
    seconds: float
    least: float
    sizes: tuple[int, ...]
    firsts: tuple[int, ...] | None
    meshes: tuple[tuple[LogicalMesh, ...], ...]
    is_bound: bool = False
    parts: int = 0

    def may_beat(self, known: float) -> bool:
        """Whether it may be faster than `known` by the table, which says nothing about layers outside of loops (`parts`)."""
        doubt = TUNING.kernels_doubt if self.is_bound else TUNING.table_doubt
        return self.least * (1 - doubt) < known or self.parts > 0

    def text(self, schedule: str) -> str:
        """A description."""
        sizes = "+".join(map(str, self.sizes))
        if len(self.sizes) > 4 and len(set(self.sizes)) == 1:
            sizes = f"{self.sizes[0]} devices each"
        apart = ", layers in no loop" if self.parts else ""
        apart += ", finer meshes" if len(self.meshes[0]) > 1 else ""
        return f"{len(self.sizes)} stages on {sizes}, {self.count} microbatches, {schedule}{apart}"


@dataclass(frozen=True, slots=True, eq=False)
class Estimates:
    """What is known about pipelines before any is planned.

    Attributes:
        layers: Costs of layers.
        crossing_bytes: `[layer]`: bytes that cross the border before that layer in a step.
        cluster: The cluster.
        budget: Memory budget of one device, bytes.
        rounds: How much the bubble counts.
        most_stages: The largest number of stages that can be cut.
    """

    layers: LayerCosts
    crossing_bytes: np.ndarray
    cluster: Cluster
    budget: float
    rounds: Rounds
    most_stages: int

    def crossing(self, count: int) -> np.ndarray:
        """`[layer]`: seconds of the transfers over the border before that layer, per microbatch of `count`.

        Between hosts, if there are several; all devices of a host send at once.
        """
        link = self.cluster.inter if self.cluster.hosts > 1 else self.cluster.intra
        sent = self.crossing_bytes / count / self.cluster.devices_per_host
        return 2 * link.latency_seconds + sent / link.bytes_per_second


def find_candidates(estimates: Estimates, counts: Sequence[int], num_firm: int, known: float) -> list[Candidate]:
    """Find candidates for each number of microbatches, best first; those with guessed costs last.

    Guesses are optimistic: they are solved for while they are among the best `num_firm`, and may beat the best step known.
    """
    layers, slicings = estimates.layers, _where_any_may_win(estimates, counts, known)

    def guessed(candidate: Candidate) -> list[int]:
        return [size for size in dict.fromkeys(candidate.sizes) if layers.is_guess(size, candidate.count)]

    for solved in range(TUNING.guesses_solved + 1):
        ranked = sorted((c for some in slicings.values() for c in some), key=lambda c: c.seconds)
        unsure = next((c for c in ranked[:num_firm] if c.may_beat(known) and guessed(c)), None)
        if unsure is None or solved == TUNING.guesses_solved:
            break
        for size in guessed(unsure):
            layers.refine(size, unsure.count)
        slicings[unsure.count] = _slicings(estimates, unsure.count)
    return sorted(ranked, key=lambda c: bool(guessed(c)))


def _where_any_may_win(estimates: Estimates, counts: Sequence[int], known: float) -> dict[int, list[Candidate]]:
    """The slicings for each number of microbatches, after layers were sharded on every submesh on which one may win.

    On the others, no pipeline beats the best step known even by its kernels alone.
    """
    layers = estimates.layers

    def promising(candidates: Iterable[Candidate]) -> list[int]:
        sizes = [size for c in candidates if c.may_beat(known) for size in c.sizes]
        return [size for size in dict.fromkeys(sizes) if layers.is_bound(size)]

    if math.isinf(known) or not layers.has_bounds():
        layers.shard_on(layers.meshes)
    else:
        layers.shard_on(promising(c for count in counts for c in equal_candidates(estimates, count)))
    while True:
        slicings = {count: _slicings(estimates, count) for count in counts}
        sizes = promising(c for some in slicings.values() for c in some)
        if not sizes:
            return slicings
        layers.shard_on(sizes)


def equal_candidates(estimates: Estimates, count: int) -> list[Candidate]:
    """Pipelines of equal work on equal submeshes: for each submesh size, on its fastest mesh."""
    found: list[Candidate] = []
    for size in estimates.layers.meshes:
        num_stages, left = divmod(estimates.cluster.num_devices, size)
        if left or not 2 <= num_stages <= estimates.most_stages:
            continue
        best = None
        sent = (num_stages - 1) * float(np.mean(estimates.crossing(count)[1:]))
        for times, lower, mesh in equal_stages(estimates.layers, size, num_stages, count, estimates.budget):
            latency = estimates.rounds.seconds(times, count, sent)
            least = estimates.rounds.seconds(lower, count) + sent / estimates.rounds.calls
            if best is None or latency < best.seconds:
                meshes, is_bound = ((mesh,),) * num_stages, estimates.layers.is_bound(size)
                least = estimates.rounds.bound(lower, count) if is_bound else least
                best = Candidate(count, latency, least, (size,) * num_stages, None, meshes, is_bound)
        found += [best] if best is not None else []
    return found


def _slicings(estimates: Estimates, count: int) -> list[Candidate]:
    """Candidates for a number of microbatches: the best slicings, and stages of equal work."""
    layers, found = estimates.layers, equal_candidates(estimates, count)
    kinds = kinds_of(layers, count, estimates.budget)
    # Also the best one without recomputation, whose cost is known only once it is planned.
    for some in (kinds, kinds.first(len(layers.meshes)))[: len(layers.levels)]:
        best = _best_slicing(estimates, some, count)
        found += [best] if best is not None else []
    # Stages of equal work, balanced anew, replace equal slicings into whole layers.
    return list({(c.sizes, c.firsts): c for c in reversed(found)}.values())


def _best_slicing(estimates: Estimates, kinds: Kinds, count: int) -> Candidate | None:
    """The slicing of least latency by the table; None: none fits."""
    crossing, rounds = estimates.crossing(count), estimates.rounds
    try:
        slicing = slice_stages(
            kinds.seconds,
            kinds.sizes,
            estimates.cluster.num_devices,
            count * rounds.calls,
            transfer_seconds=crossing,
            max_in_flight=kinds.flight,
            gap=0.02,
        )
    except InfeasibleError:
        return None
    stages = slicing.stages
    alike = len({s.last - s.first for s in stages}) == 1
    times, lower = (np.array([of[s.first, s.last, s.submesh] for s in stages]) for of in (kinds.seconds, kinds.least))
    sent = sum(float(crossing[s.first]) for s in stages[1:])
    sizes = tuple(kinds.sizes[s.submesh] for s in stages)
    is_bound = all(map(estimates.layers.is_bound, sizes))
    return Candidate(
        count,
        rounds.seconds(times, count, sent),
        rounds.bound(lower, count) if is_bound else rounds.seconds(lower, count) + sent / rounds.calls,
        sizes,
        None if alike else tuple(s.first for s in stages),
        tuple((kinds.meshes[s.first, s.last, s.submesh],) for s in stages),
        is_bound,
    )
