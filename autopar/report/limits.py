"""Finds what limits a pipeline: the busiest mesh, and when it waits.

In:     the events of a step, simulated or measured.
Out:    `Limit`: the busiest mesh's seconds of work, and its idle seconds before, between and after its microbatches.
Method: a step lasts as long as its busiest mesh works and waits. A mesh waits for earlier stages before its first microbatch
        (the pipeline fills), for activations and gradients between its microbatches, and for other stages after its last
        (the pipeline drains).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.grouping import grouped
from autopar.streams.timeline import Event


@dataclass(frozen=True, slots=True)
class Limit:
    """The busiest mesh of a step: its work, and its idle time before, between and after its microbatches.

    `transfer_seconds`: the busiest sender's time.
    """

    mesh: int
    stages: tuple[int, ...]
    busy_seconds: float
    fill_seconds: float
    gap_seconds: float
    drain_seconds: float
    transfer_seconds: float


def find_limit(events: Sequence[Event]) -> Limit | None:
    """The limit of a step; None: nothing runs."""
    runs = grouped((e.mesh, e) for e in events if e.kind != "transfer")
    sends = grouped((e.mesh, e.end - e.start) for e in events if e.kind == "transfer")
    if not runs:
        return None
    busy = {mesh: sum(e.end - e.start for e in of_mesh) for mesh, of_mesh in runs.items()}
    mesh = max(busy, key=lambda m: (busy[m], -m))
    own = runs[mesh]
    looped = [e for e in own if e.kind in ("F", "B", "W")] or own
    first, last = min(e.start for e in looped), max(e.end for e in looped)
    end = max(e.end for e in events)

    def idle(start: float, stop: float) -> float:
        worked = sum(max(0.0, min(e.end, stop) - max(e.start, start)) for e in own)
        return max(0.0, stop - start - worked)

    return Limit(
        mesh,
        tuple(sorted({e.stage for e in own})),
        busy[mesh],
        idle(0.0, first),
        idle(first, last),
        idle(last, end),
        max(map(sum, sends.values()), default=0.0),
    )
