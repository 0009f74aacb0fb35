"""Pipelines that the stage table suggests: which stages, on which submeshes, in how many microbatches.

In:     costs of layers (`layer_costs.py`), what crosses their borders.
Out:    `Candidate`s, best first.
Method: for each number of microbatches, stages of equal work on equal submeshes, as one would write them by hand, and what the
        DP of `inter_op/slicing.py` picks. They are ranked as the best schedule for them may turn out: half of the bubble of
        1F1B. What rests on a guess is solved first, where it stands among the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.errors import InfeasibleError
from autopar.inter_op.slicing import slice_stages
from autopar.mesh import Cluster, LogicalMesh
from autopar.search.layer_costs import LayerCosts
from autopar.search.table import Kinds, equal_stages, kinds_of

MOST_SOLVED = 8
"""So many candidates at most have their layers sharded for their number of microbatches, where scaling only guesses."""
BUBBLE = 0.5
"""Part of 1F1B's bubble that the schedules which send or keep more for it leave."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pipeline to be planned.

    Attributes:
        count: Number of microbatches.
        seconds: What the table says of it.
        least: What it says if all communication were hidden that could be.
        sizes: Devices of each stage.
        firsts: First layer of each stage; None: balanced anew, as many parts of a scan as stages.
        meshes: Of each stage, the logical meshes to try.
        parts: So many parts of a scan instead; 0: not.
    """

    count: int
    seconds: float
    least: float
    sizes: tuple[int, ...]
    firsts: tuple[int, ...] | None
    meshes: tuple[tuple[LogicalMesh, ...], ...]
    parts: int = 0

    def text(self, schedule: str) -> str:
        """For people."""
        sizes = "+".join(map(str, self.sizes))
        if len(self.sizes) > 4 and len(set(self.sizes)) == 1:
            sizes = f"{self.sizes[0]} devices each"
        apart = ", layers in no loop" if self.parts else ""
        return f"{len(self.sizes)} stages on {sizes}, {self.count} microbatches, {schedule}{apart}"


def find_candidates(
    layers: LayerCosts,
    counts: Sequence[int],
    crossing: np.ndarray,
    cluster: Cluster,
    budget: float,
    num_firm: int,
    most_stages: int,
    calls: int = 1,
) -> list[Candidate]:
    """Candidates, best first; those that rest on guesses last.

    A guess is on the fast side: it is solved as long as it stands among the best `num_firm`.

    Args:
        layers: Costs of layers.
        counts: Numbers of microbatches.
        crossing: `[layer]`: seconds per step to bring what crosses the border before that layer over it.
        cluster: The machine.
        budget: Bytes of one device.
        num_firm: So many of the best are not to rest on guesses.
        most_stages: More cannot be cut.
        calls: In a row, that do not wait for each other; what counts is the time of one among them.
    """
    slicings = {
        count: _slicings(layers, count, crossing / count, cluster, budget, most_stages, calls) for count in counts
    }

    def guessed(candidate: Candidate) -> list[int]:
        return [size for size in dict.fromkeys(candidate.sizes) if layers.is_guess(size, candidate.count)]

    for solved in range(MOST_SOLVED + 1):
        ranked = sorted((c for some in slicings.values() for c in some), key=lambda c: c.seconds)
        unsure = next((c for c in ranked[:num_firm] if guessed(c)), None)
        if unsure is None or solved == MOST_SOLVED:
            break
        for size in guessed(unsure):
            layers.solve(size, unsure.count)
        count = unsure.count
        slicings[count] = _slicings(layers, count, crossing / count, cluster, budget, most_stages, calls)
    return sorted(ranked, key=lambda c: bool(guessed(c)))


def equal_candidates(
    layers: LayerCosts,
    crossing: np.ndarray,
    count: int,
    cluster: Cluster,
    budget: float,
    most_stages: int,
    calls: int = 1,
) -> list[Candidate]:
    """Pipelines of equal work on equal submeshes; of each size of these the mesh on which they are fastest."""
    found: list[Candidate] = []
    for size in layers.meshes:
        num_stages = cluster.num_devices // size
        if cluster.num_devices % size or not 2 <= num_stages <= most_stages:
            continue
        best = None
        sent = (num_stages - 1) * float(np.mean(crossing[1:]))
        for times, lower, mesh in equal_stages(layers, size, num_stages, count, budget):
            latency, least = (_latency(each, count, calls) + sent / calls for each in (times, lower))
            if best is None or latency < best.seconds:
                best = Candidate(count, latency, least, (size,) * num_stages, None, ((mesh,),) * num_stages)
        found += [best] if best is not None else []
    return found


def _latency(times: np.ndarray, count: int, calls: int) -> float:
    """Seconds of a step under the schedule with the least bubble, which is there once for all calls in a row."""
    slowest = float(times.max())
    return count * slowest + BUBBLE * (float(times.sum()) - slowest) / calls


def _slicings(
    layers: LayerCosts, count: int, crossing: np.ndarray, cluster: Cluster, budget: float, most_stages: int, calls: int
) -> list[Candidate]:
    """The best slicing for a number of microbatches, and some that one would write by hand."""
    kinds = kinds_of(layers, count, budget)
    found = equal_candidates(layers, crossing, count, cluster, budget, most_stages, calls)
    # Also the best one that runs nothing more again: what recomputation takes is known only when it is planned.
    for some in (kinds, kinds.first(len(layers.meshes)))[: len(layers.levels)]:
        best = _best_slicing(some, crossing, count, cluster, calls)
        found += [best] if best is not None else []
    # Equal stages that are balanced anew stand for the same stages made of whole layers.
    return list({(c.sizes, c.firsts): c for c in reversed(found)}.values())


def _best_slicing(kinds: Kinds, crossing: np.ndarray, count: int, cluster: Cluster, calls: int) -> Candidate | None:
    """The slicing of least latency of so many calls in a row, by the table; None: none fits, or it is one stage."""
    try:
        slicing = slice_stages(
            kinds.seconds,
            kinds.sizes,
            cluster.num_devices,
            count * calls,
            transfer_seconds=crossing,
            max_in_flight=kinds.flight,
            gap=0.02,
        )
    except InfeasibleError:
        return None
    stages = slicing.stages
    alike = len({s.last - s.first for s in stages}) == 1
    times, lower = (np.array([of[s.first, s.last, s.submesh] for s in stages]) for of in (kinds.seconds, kinds.least))
    sent = sum(float(crossing[s.first]) for s in stages[1:]) / calls
    return Candidate(
        count,
        _latency(times, count, calls) + sent,
        _latency(lower, count, calls) + sent,
        tuple(kinds.sizes[s.submesh] for s in stages),
        None if alike else tuple(s.first for s in stages),
        tuple((kinds.meshes[s.first, s.last, s.submesh],) for s in stages),
    )
