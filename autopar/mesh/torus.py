"""Tori, as TPUs are connected: at which rate devices communicate that lie along one or several of its axes.

In:     the chips of a slice, how many axes its torus has, what length of an axis closes to a ring.
Out:    `torus_parts`: (devices, part of one ring's rate), for `Link.torus`.
Method: a slice is as near to a square or cube as powers of two allow, as Google's tables of slices have it. Along an axis that
        closes, a collective runs both ways round the ring at once; along one that does not, or along a part of it, a chain has
        half of that. Devices that fill several axes use the rings of all at once, each for a part of the bytes. Google Cloud's
        TPU documentation, "TPU v5p", "TPU v5e"; Jouppi et al., "TPU v4", ISCA 2023; Austin et al., "How to scale your
        model", 2025, ch. 3.
"""

from __future__ import annotations

import itertools
import math

OPEN = 0.5
"""Part of a ring's rate that a chain has: what goes through it goes one way."""


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
    """For groups of neighbours of a slice: (devices up to, part of one ring's rate that they have), ascending.

    Of its axes, 2 or 3, those of a multiple of `closes_at` close to rings, on a 3D torus if all of them are such.
    """
    sides = slice_sides(num_chips, num_axes)
    closed = [side % closes_at == 0 for side in sides]
    if num_axes == 3 and not all(closed):
        closed = [False] * num_axes
    rate_of: dict[int, float] = {}
    for count in range(1, num_axes + 1):
        for axes in itertools.combinations(range(num_axes), count):
            size = math.prod(sides[axis] for axis in axes)
            rate = sum(1.0 if closed[axis] else OPEN for axis in axes if sides[axis] > 1)
            rate_of[size] = max(rate_of.get(size, 0.0), rate)
    found: list[tuple[int, float]] = []
    best = OPEN
    for size, rate in sorted(rate_of.items()):
        if size > 2:
            found.append((size - 1, best))
        best = max(best, rate)
        found.append((size, best))
    return tuple(found)
