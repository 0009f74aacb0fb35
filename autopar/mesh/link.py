"""The connection between neighbours along one mesh axis."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """Attributes:
        latency_seconds: Time before the first byte of a message arrives.
        bytes_per_second: Rate in one direction, per device.
    """

    latency_seconds: float
    bytes_per_second: float
