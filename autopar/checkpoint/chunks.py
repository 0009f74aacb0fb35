"""Chunks: the pieces in which an array lies on disk, such that no two writers share one.

In:     the shape of an array, the boxes that are written one by one.
Out:    the shape of its chunks.
Method: chunks form a regular grid from the array's beginning; only the last along a dim may be cut short by its end. So a
        chunk's length along a dim must divide every boundary between boxes: it divides their greatest common divisor.
        What is too large is then cut along the dim that leaves the largest pieces.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.mesh import Box


def chunk_shape(shape: Sequence[int], boxes: Sequence[Box], itemsize: int, most_bytes: int) -> tuple[int, ...]:
    """Shape of the chunks of an array whose parts are written by one process each; none has more than `most_bytes`."""
    boundaries = [
        math.gcd(*(at for box in boxes for at in box[dim] if at < length)) for dim, length in enumerate(shape)
    ]
    chunk = [boundary or length for boundary, length in zip(boundaries, shape, strict=True)]
    while (num_bytes := math.prod(chunk) * itemsize) > most_bytes and math.prod(chunk) > 1:
        cuts = []
        for dim, length in enumerate(chunk):
            others = num_bytes // length
            cut = _cut(length, max(1, most_bytes // others), boundaries[dim] > 0)
            cuts.append((others * cut, dim, cut))
        small_enough = [cut for cut in cuts if cut[0] <= most_bytes]
        # Where no dim does it alone: all of the one that helps most, and then another.
        _, dim, cut = max(small_enough, key=lambda c: (c[0], -c[1])) if small_enough else min(cuts)
        chunk[dim] = cut
    return tuple(chunk)


def _cut(length: int, most: int, has_boundary: bool) -> int:
    """At most `most`; where there are boundaries, a divisor."""
    if length <= most:
        return length
    if not has_boundary:
        return math.ceil(length / math.ceil(length / most))
    small = [n for n in range(1, math.isqrt(length) + 1) if length % n == 0]
    return max(n for n in (*small, *(length // n for n in small)) if n <= most)
