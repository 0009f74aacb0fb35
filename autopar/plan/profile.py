"""What a step does with its time and memory, as pictures show it: facts beside the decision.

In:     (types only; `search/profile.py` makes them of a plan, `record.py` saves them.)
Out:    `Profile`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autopar.streams.timeline import EventKind

CrossingKind = Literal["forward", "backward", "update"]
"""With each microbatch; or once per step."""
MemoryUnit = Literal["seconds", "operations"]
"""Memory over the time of a step, or along its program."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a stage computes in one step: seconds of a kind, of all microbatches, without communication."""

    stage: int
    kind: EventKind
    seconds: float


@dataclass(frozen=True, slots=True)
class Memory:
    """What one device of a mesh holds over a step.

    Attributes:
        mesh: Which mesh.
        unit: Along what.
        curve: (when, bytes from then on), ascending.
        peak: What it consists of at its highest point: (what, bytes), largest first.
    """

    mesh: int
    unit: MemoryUnit
    curve: tuple[tuple[float, int], ...]
    peak: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Crossing:
    """What one stage hands to another in a step: bytes, in how many messages, the type of the largest array."""

    source: int
    target: int
    kind: CrossingKind
    bytes: int
    messages: int
    largest: str


@dataclass(frozen=True, slots=True)
class Profile:
    """Time, memory and borders of a step."""

    work: tuple[Work, ...] = ()
    memory: tuple[Memory, ...] = ()
    crossings: tuple[Crossing, ...] = ()
