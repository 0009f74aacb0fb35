"""Which rows of a batch each worker holds, and in how many portions it is cut so that no worker reads rows of others.

In:     how the arrays of a batch lie on the devices of each worker.
Out:    the number of portions; the portions that a worker needs; a device's piece of an array, out of portions.
Method: portions are equal and lie one below the other. There are as few as can be such that what a worker holds is made of
        whole ones: one for all where the batch is not split over hosts, one per host where each holds one run of rows. In
        microbatches a host holds a run of each, so there are more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.mesh import ArrayType, Box
from autopar.runtime.ray.seats import Seat
from autopar.runtime.ray.transport.parcels import own_boxes, slices


@dataclass(frozen=True, slots=True)
class Wanted:
    """An array of the batch (`leaf`) as a worker wants it; `is_piece`: with a leading dim of microbatches."""

    leaf: int
    kind: ArrayType
    is_piece: bool

    @property
    def num_leading(self) -> int:
        """Dims that count rows: of microbatches, and in each; of a number none."""
        return min(1 + self.is_piece, len(self.kind.shape))

    def rows_in(self, box: Box) -> np.ndarray:
        """Numbers of the rows of the batch that are in a portion of this array, in order."""
        leading = self.kind.shape[: self.num_leading]
        whole = tuple((0, length) for length in leading)
        return np.arange(math.prod(leading)).reshape(leading)[slices(box[: self.num_leading], whole)].ravel()


def count_portions(rows: int, held: Iterable[tuple[Sequence[Wanted], Seat]]) -> int:
    """In how many portions a batch of so many rows is cut, of which workers hold some of these arrays."""
    length = rows
    for wanted, seat in held:
        for start, stop in _runs(_own_rows(wanted, seat)):
            length = math.gcd(length, start, stop)
    return rows // length


def portions_for(rows: int, count: int, wanted: Sequence[Wanted], seat: Seat) -> tuple[int, ...]:
    """Of `count` portions of a batch those that hold all rows of a worker; numbers, which have no rows, are in each."""
    length = rows // count
    return tuple(dict.fromkeys(int(row) // length for row in _own_rows(wanted, seat))) or (0,)


def cut_out(wanted: Wanted, box: Box, portions: Mapping[int, np.ndarray]) -> np.ndarray:
    """A device's piece (`box`) of an array, out of its portions by number; those that have rows of the piece must be there."""
    dtype, leading = wanted.kind.dtype, wanted.num_leading
    if not leading:
        return np.asarray(next(iter(portions.values())), dtype)
    length = len(next(iter(portions.values())))
    rest = tuple(slice(*side) for side in box[leading:])
    own = []
    for start, stop in _runs(wanted.rows_in(box)):
        for k in range(start // length, (stop - 1) // length + 1):
            rows = slice(max(start - k * length, 0), min(stop - k * length, length))
            own.append(np.asarray(portions[k][(rows, *rest)], dtype))
    whole = own[0] if len(own) == 1 else np.concatenate(own)
    return whole.reshape([stop - start for start, stop in box])


def _own_rows(wanted: Sequence[Wanted], seat: Seat) -> np.ndarray:
    """Numbers of the rows that a worker holds of any array, in order."""
    rows = [each.rows_in(box) for each in wanted if each.num_leading for box in own_boxes(each.kind, seat)]
    return np.unique(np.concatenate(rows)) if rows else np.arange(0)


def _runs(rows: np.ndarray) -> list[tuple[int, int]]:
    """Runs of consecutive numbers: the first, and the one behind the last."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(rows, breaks) if len(run)]
