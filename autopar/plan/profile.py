"""The time, memory and traffic of a step, for pictures.

In:     (types only; `search/profile.py` derives them from a plan, `record.py` saves them.)
Out:    `Profile`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autopar.streams.timeline import EventKind

CrossingKind = Literal["forward", "backward", "update"]
"""Forward and backward: with each microbatch; update: once per step."""
MemoryUnit = Literal["seconds", "operations"]
"""The axis of a memory curve: time of the step, or position in its program."""


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds that a stage computes in one step for tasks of one kind: all microbatches, without communication."""

    stage: int
    kind: EventKind
    seconds: float


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one device of a mesh over a step.

    Attributes:
        mesh: Number of the mesh.
        unit: Unit of the curve's first coordinate.
        curve: (position, bytes live from there on), ascending.
        peak: Contents at the peak: (what, bytes), largest first.
    """

    mesh: int
    unit: MemoryUnit
    curve: tuple[tuple[float, int], ...]
    peak: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Crossing:
    """The traffic from one stage to another in a step: bytes, number of messages, type of the largest array."""

    source: int
    target: int
    kind: CrossingKind
    bytes: int
    messages: int
    largest: str


@dataclass(frozen=True, slots=True)
class Profile:
    """The time, memory and traffic between stages of a step."""

    work: tuple[Work, ...] = ()
    memory: tuple[Memory, ...] = ()
    crossings: tuple[Crossing, ...] = ()
