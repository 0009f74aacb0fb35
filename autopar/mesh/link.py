"""The connection between neighbours along one mesh axis."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

from autopar.errors import ClusterError


@dataclass(frozen=True, slots=True)
class Link:
    """What one device sends to the next along an axis, while all others do the same.

    Attributes:
        latency_seconds: Time before the first byte of a message arrives.
        bytes_per_second: Rate in one direction, per device.

    Raises:
        ClusterError: A negative latency, or a rate that is not positive.
    """

    latency_seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        numbers = isinstance(self.latency_seconds, Real) and isinstance(self.bytes_per_second, Real)
        if not numbers or self.latency_seconds < 0 or not self.bytes_per_second > 0:
            raise ClusterError(
                "a link needs a latency and a rate.",
                given=f"Link({self.latency_seconds!r}, {self.bytes_per_second!r})",
                wrong="both are numbers; the latency may not be negative, and the rate must be more than 0.",
                do="pass Link(latency_seconds, bytes_per_second), such as Link(2e-6, 300e9).",
            )

    def __str__(self) -> str:
        return f"{self.bytes_per_second / 1e9:g} GB/s, {self.latency_seconds * 1e6:g} us"
