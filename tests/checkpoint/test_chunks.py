"""Chunks: no two writers share one, and none is larger, or much smaller, than it may be."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from autopar.checkpoint.apart import chunk_shape


def grid(*cuts):
    """Boxes between the cuts of each dim."""
    sides = [list(itertools.pairwise(own)) for own in cuts]
    return [tuple(box) for box in itertools.product(*sides)]


@pytest.mark.parametrize("seed", range(40))
def test_no_chunk_has_two_writers(seed):
    """Parts stacked along dim 0 of any lengths, each cut in its own way along both dims."""
    random = np.random.default_rng(seed)
    rows, boxes = 0, []
    columns = int(random.choice([1, 12, 30, 64]))
    for _ in range(random.integers(1, 4)):
        ways = [int(random.choice([1, 2, 3, 4])) for _ in range(2)]
        length = ways[0] * int(random.integers(1, 9))
        across = ways[1] if columns % ways[1] == 0 else 1
        down = range(rows, rows + length + 1, length // ways[0])
        boxes += grid(down, range(0, columns + 1, columns // across))
        rows += length
    most = int(random.choice([4, 64, 500, 10_000]))
    chunk = chunk_shape((rows, columns), boxes, 4, most)
    assert math.prod(chunk) * 4 <= most
    writers: dict[tuple[int, ...], set[int]] = {}
    for writer, box in enumerate(boxes):
        for at in itertools.product(
            *(range(start // c, -(-stop // c)) for (start, stop), c in zip(box, chunk, strict=True))
        ):
            writers.setdefault(at, set()).add(writer)
    assert all(len(own) == 1 for own in writers.values()), (chunk, boxes)


MIB = 2**20


@pytest.mark.parametrize(
    "shape, boxes, most, chunk",
    [
        ((), [()], MIB, ()),
        ((12, 8), grid((0, 12), (0, 8)), MIB, (12, 8)),
        ((12, 8), grid((0, 4, 12), (0, 8)), MIB, (4, 8)),  # a stage of 4 layers, and one of 8
        ((12, 8), grid((0, 6, 12), (0, 2, 8)), MIB, (6, 2)),
        ((10, 8), grid((0, 4, 10), (0, 8)), MIB, (4, 8)),  # the last along a dim may be cut short
        ((13, 8), grid((0, 4, 10, 13), (0, 8)), MIB, (2, 8)),
        ((4096, 1024), grid((0, 4096), (0, 1024)), MIB, (256, 1024)),
        ((500_009, 64), grid((0, 500_009), (0, 64)), MIB, (4066, 64)),  # a prime: cut anywhere
        ((1_000_018, 64), grid((0, 500_009, 1_000_018), (0, 64)), 4 * MIB, (500_009, 2)),  # not along dim 0
        ((2 * 10_007, 10_007), grid((0, 10_007, 20_014), (0, 10_007)), MIB, (10_007, 26)),
    ],
)
def test_chunks(shape, boxes, most, chunk):
    assert chunk_shape(shape, boxes, 4, most) == chunk


def test_an_element_may_be_more():
    assert chunk_shape((4, 4), grid((0, 4), (0, 4)), 16, 8) == (1, 1)
