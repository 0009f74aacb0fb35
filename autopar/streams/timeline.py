"""Writes timelines of simulated and measured steps as Chrome traces, which Perfetto opens, and as text.

In:     events: the runs and messages of a step, with their times.
Out:    `Timeline`: events with `args = {"kind", "stage", "microbatch", "mesh"}`, as JSON.
Method: Trace Event Format, complete events ("X"), a thread per mesh for runs and one for what it sends.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

EventKind = Literal["F", "M", "B", "W", "U", "init", "transfer"]
"""Forward, joins between rounds, backward, weight gradients, update; before the first microbatch; messages."""

WIDTH = 100
"""Columns of a timetable in text."""


@dataclass(frozen=True, slots=True)
class Event:
    """One bar of the timeline; times in seconds from the start of the step."""

    name: str
    kind: EventKind
    stage: int
    microbatch: int
    mesh: int
    start: float
    end: float


@dataclass(frozen=True, slots=True, repr=False)
class Timeline:
    """The events of a step, by start."""

    events: tuple[Event, ...]

    @property
    def seconds(self) -> float:
        """Length of the step."""
        return max((e.end for e in self.events), default=0.0)

    @property
    def busy_seconds(self) -> dict[int, float]:
        """For each mesh, the total time of its runs."""
        found: dict[int, float] = {}
        for event in self.events:
            if event.kind != "transfer":
                found[event.mesh] = found.get(event.mesh, 0.0) + event.end - event.start
        return found

    def trace(self) -> dict[str, Any]:
        """The Chrome trace as an object: `{"traceEvents": [...]}`, times in microseconds."""
        found = [
            _traced(
                "M", "thread_name", mesh, is_sending, args={"name": f"mesh {mesh} {'sends' if is_sending else 'runs'}"}
            )
            for mesh in sorted({e.mesh for e in self.events})
            for is_sending in (False, True)
        ]
        for e in self.events:
            args = {"kind": e.kind, "stage": e.stage, "microbatch": e.microbatch, "mesh": e.mesh}
            times = {"ts": e.start * 1e6, "dur": (e.end - e.start) * 1e6}
            found.append(_traced("X", e.name, e.mesh, e.kind == "transfer", cat=e.kind, **times, args=args))
        return {"traceEvents": found, "displayTimeUnit": "ms"}

    def json(self) -> str:
        """The Chrome trace as text."""
        return json.dumps(self.trace())

    def save(self, path: str | Path) -> None:
        """Write the Chrome trace; open it at ui.perfetto.dev."""
        Path(path).write_text(self.json())

    def __repr__(self) -> str:
        runs = sum(e.kind != "transfer" for e in self.events)
        return f"Timeline({runs} runs and {len(self.events) - runs} messages in {self.seconds * 1e3:.3g} ms)"

    def __str__(self) -> str:
        return timetable_text(self.events)


def _traced(phase: str, name: str, mesh: int, is_sending: bool, **more: Any) -> dict[str, Any]:
    """An event in the trace format; a mesh has one thread for its runs and one for its messages."""
    return {"ph": phase, "name": name, "pid": 0, "tid": 2 * mesh + is_sending, **more}


def timetable_text(events: Sequence[Event]) -> str:
    """Runs as text: a row per mesh, the width of each run proportional to its time."""
    runs = [e for e in events if e.kind != "transfer"]
    total = max((e.end for e in runs), default=0.0)
    if not total:
        return "(nothing runs)"
    lines = []
    for mesh in sorted({e.mesh for e in runs}):
        row = ["."] * WIDTH
        for e in runs:
            if e.mesh == mesh:
                first = min(WIDTH - 1, int(e.start / total * WIDTH))
                last = max(first + 1, min(WIDTH, round(e.end / total * WIDTH)))
                label = f"{e.kind}{e.microbatch}" if e.kind in "FBW" else "I" if e.kind == "init" else e.kind
                text = (label + "=" * WIDTH)[: last - first]
                row[first:last] = list(text)
        lines.append(f"mesh {mesh}  " + "".join(row))
    return "\n".join(lines)
