"""The link between neighbours along one mesh axis, and that of a torus, which connects TPUs.

In:     latency and rates; the chips of a slice, the number of axes of its torus, and the length at which an axis wraps around
        to a ring.
Out:    `Link`; `torus_parts`: (devices, fraction of one ring's rate), for `Link.torus`.
Method: a slice is as near to a square or cube as powers of two allow, as in Google's tables of slices. Along an axis that
        wraps around, a collective runs both ways round the ring at once; along another, or along a part of an axis, a chain
        has half of that rate. Devices that fill several axes use all their rings at once, each for a share of the bytes.
        Google Cloud's TPU documentation, "TPU v5p", "TPU v5e"; Jouppi et al., "TPU v4", ISCA 2023; Austin et al., "How to
        scale your model", 2025, ch. 3.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass

from autopar.errors import ClusterError, check_number


@dataclass(frozen=True, slots=True)
class Link:
    """Latency and rate at which one device sends to the next along an axis, while all others do the same.

    Attributes:
        latency_seconds: Time before the first byte of a message arrives.
        bytes_per_second: Rate in one direction, per device, that collectives reach.
        switch_bytes_per_second: Rate at which a switch reduces data of all devices and returns the sum, such as NVLink
            SHARP; 0: no switch does.
        has_short_messages: Whether the library has protocols of lower latency and rate for short messages, as NCCL has.
        groups: For links without a switch: (devices of a group, fraction of the rate that a group up to that size reaches).
        torus: For links of a torus, like `groups` (`torus_parts`): the rate is that of a ring along one of its axes, both
            ways, and a group that fills several axes has the sum of their rings' rates.
        shared_memory: Whether the devices share one memory, as virtual CPU devices do. A collective then costs one latency
            per participant, and copies whose bytes do not depend on the number of participants.
        in_host: Of an axis through several hosts: how many devices of each it takes, and the rate between these. Rings use
            the network cards of all of them; the other devices of the host have rings and cards of their own.

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
    in_host: tuple[int, float] = (1, math.inf)

    def __post_init__(self) -> None:
        for name, least in (("latency_seconds", 0), ("bytes_per_second", None), ("switch_bytes_per_second", 0)):
            do = "pass Link(latency_seconds, bytes_per_second), such as Link(2e-6, 300e9)."
            check_number("Link", name, getattr(self, name), least=least, kind=ClusterError, do=do)

    @property
    def ring_bytes_per_second(self) -> float:
        """Rate of the rings along the axis together, or of trees: each crosses to the next host by another card."""
        cards, inside = self.in_host
        return min(cards * self.bytes_per_second, inside)

    def within(self, num_devices: int) -> Link:
        """The link as a group of `num_devices` neighbours has it."""
        if not self.groups:
            return self
        part = _part_of(self.groups, num_devices)
        return dataclasses.replace(self, bytes_per_second=self.bytes_per_second * part, groups=())

    def along(self, num_devices: int) -> Link:
        """The link as a collective of `num_devices` neighbours on a torus has it."""
        part = _part_of(self.torus, num_devices)
        return dataclasses.replace(self, bytes_per_second=self.bytes_per_second * part)

    def axes(self, num_devices: int) -> float:
        """The number of torus axes that `num_devices` neighbours fill, as their rate over that of a single axis."""
        closes = self.torus[-1][1] >= 2 * CLOSED
        return max(1.0, _part_of(self.torus, num_devices) / (CLOSED if closes else OPEN))

    def __str__(self) -> str:
        return f"{self.bytes_per_second / 1e9:g} GB/s, {self.latency_seconds * 1e6:g} us"


def _part_of(groups: tuple[tuple[int, float], ...], num_devices: int) -> float:
    return next((part for size, part in sorted(groups) if num_devices <= size), 1.0)


OPEN, CLOSED = 0.5, 1.0
"""Fractions of a ring's rate: that of a chain, through which data goes one way, and that of a ring."""


def slice_sides(num_chips: int, num_axes: int) -> tuple[int, ...]:
    """Lengths of the axes of a slice, ascending: 32 chips on 3 axes are 2 x 4 x 4."""
    sides, left, factor = [1] * num_axes, num_chips, 2
    factors: list[int] = []
    while left > 1:
        if left % factor:
            factor += 1
        else:
            factors.append(factor)
            left //= factor
    for found in sorted(factors, reverse=True):
        sides[sides.index(min(sides))] *= found
    return tuple(sorted(sides))


def torus_parts(num_chips: int, num_axes: int, closes_at: int) -> tuple[tuple[int, float], ...]:
    """For groups of neighbours of a slice: (devices up to, fraction of one ring's rate that they have), ascending.

    An axis whose length is a multiple of `closes_at` wraps around to a ring; on a 3D torus only if all three are.
    """
    sides = slice_sides(num_chips, num_axes)
    closed = [side % closes_at == 0 for side in sides]
    if num_axes == 3 and not all(closed):
        closed = [False] * num_axes
    rate_of: dict[int, float] = {}
    for count in range(1, num_axes + 1):
        for axes in itertools.combinations(range(num_axes), count):
            size = math.prod(sides[axis] for axis in axes)
            rate = sum(CLOSED if closed[axis] else OPEN for axis in axes if sides[axis] > 1)
            rate_of[size] = max(rate_of.get(size, 0.0), rate)
    found: list[tuple[int, float]] = []
    best = OPEN
    for size, rate in sorted(rate_of.items()):
        if size > 2:
            found.append((size - 1, best))
        best = max(best, rate)
        found.append((size, best))
    return tuple(found)
