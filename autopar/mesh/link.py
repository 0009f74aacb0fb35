"""The connection between neighbours along one mesh axis."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from autopar.errors import ClusterError, check_number


@dataclass(frozen=True, slots=True)
class Link:
    """What one device sends to the next along an axis, while all others do the same.

    Attributes:
        latency_seconds: Time before the first byte of a message arrives.
        bytes_per_second: Rate in one direction, per device, that collectives reach.
        switch_bytes_per_second: Rate at which a switch adds up what all devices send it and hands the sum out, such as
            NVLink SHARP; 0: no switch does.
        has_short_messages: Whether the library has protocols for short messages, of less latency and a lower rate, as NCCL.
        groups: Where the links are no switch: (devices of a group, part of the rate that so many neighbours reach).
        torus: Where they are those of a torus, as of `groups` (`torus_parts`): the rate is that of the ring along one of its
            axes, both ways, and devices that fill several axes have that of all their rings.
        shared_memory: Whether there is no wire: the devices share one memory, as virtual CPU devices do. A collective is
            then one meeting of all who take part, a latency each, and copies whose bytes do not depend on how many they are.

    Raises:
        ClusterError: A negative latency, or a rate that is not positive.
    """

    latency_seconds: float
    bytes_per_second: float
    switch_bytes_per_second: float = 0.0
    has_short_messages: bool = False
    groups: tuple[tuple[int, float], ...] = ()
    shared_memory: bool = False
    torus: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("latency_seconds", 0), ("bytes_per_second", None), ("switch_bytes_per_second", 0)):
            do = "pass Link(latency_seconds, bytes_per_second), such as Link(2e-6, 300e9)."
            check_number("Link", name, getattr(self, name), least=least, kind=ClusterError, do=do)

    def within(self, num_devices: int) -> Link:
        """The link as a group of so many neighbours has it."""
        if not self.groups:
            return self
        part = _part_of(self.groups, num_devices)
        return dataclasses.replace(self, bytes_per_second=self.bytes_per_second * part, groups=())

    def along(self, num_devices: int) -> Link:
        """The link as a collective of so many neighbours on a torus has it."""
        part = _part_of(self.torus, num_devices)
        return dataclasses.replace(self, bytes_per_second=self.bytes_per_second * part)

    def __str__(self) -> str:
        return f"{self.bytes_per_second / 1e9:g} GB/s, {self.latency_seconds * 1e6:g} us"


def _part_of(groups: tuple[tuple[int, float], ...], num_devices: int) -> float:
    return next((part for size, part in sorted(groups) if num_devices <= size), 1.0)
