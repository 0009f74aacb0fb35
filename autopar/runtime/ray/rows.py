"""Divides batches into portions, so that each worker reads only portions of which it holds all rows.

In:     the shardings of a batch's arrays on the devices of each worker.
Out:    the number of portions; the portions that a worker needs; a device's piece of an array, cut from portions.
Method: portions are equal runs of rows, as few as possible such that what each worker holds is made of whole portions: one if
        the batch is not split over hosts, one per host if each holds one run of rows, more with microbatches, of each of
        which a host holds a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.ir.dims import in_pieces
from autopar.mesh import ArrayType, Box
from autopar.runtime.ray.seats import Seat
from autopar.runtime.ray.transport.parcels import own_boxes, slices


@dataclass(frozen=True, slots=True)
class Wanted:
    """A type in which a worker wants array `leaf` of the batch.

    Attributes:
        is_piece: It has a leading dim of microbatches.
        dim: The dim of the batch's array that these split; the rows of a stack for several steps are whole in each.
    """

    leaf: int
    kind: ArrayType
    is_piece: bool
    dim: int = 0

    @property
    def num_leading(self) -> int:
        """Number of leading dims that count rows: of microbatches, and within each; 0 for a scalar."""
        return min(1 + self.is_piece, len(self.kind.shape))

    def rows_in(self, box: Box) -> np.ndarray:
        """Numbers of the batch's rows in a box of this array, in order."""
        if self.dim:
            return np.arange(*box[1])
        leading = self.kind.shape[: self.num_leading]
        whole = tuple((0, length) for length in leading)
        return np.arange(math.prod(leading)).reshape(leading)[slices(box[: self.num_leading], whole)].ravel()


def count_portions(rows: int, held: Iterable[tuple[Sequence[Wanted], Seat]]) -> int:
    """The number of portions of a batch of `rows` rows; `held`: the arrays that each worker holds."""
    length = rows
    for wanted, seat in held:
        for start, stop in _runs(_own_rows(wanted, seat)):
            length = math.gcd(length, start, stop)
    return rows // length


def portions_for(rows: int, count: int, wanted: Sequence[Wanted], seat: Seat) -> tuple[int, ...]:
    """Which of `count` portions a worker needs; scalars, which have no rows, are in every portion."""
    length = rows // count
    return tuple(dict.fromkeys(int(row) // length for row in _own_rows(wanted, seat))) or (0,)


def cut_out(wanted: Wanted, box: Box, portions: Mapping[int, np.ndarray]) -> np.ndarray:
    """A device's piece (`box`) of an array, cut from portions by number, which must include all rows of the piece."""
    dtype, leading = wanted.kind.dtype, wanted.num_leading
    if not leading:
        return np.asarray(next(iter(portions.values())), dtype)
    length = len(next(iter(portions.values())))
    rest = () if wanted.dim else tuple(slice(*side) for side in box[leading:])
    own = []
    for start, stop in _runs(wanted.rows_in(box)):
        for k in range(start // length, (stop - 1) // length + 1):
            rows = slice(max(start - k * length, 0), min(stop - k * length, length))
            own.append(np.asarray(portions[k][(rows, *rest)], dtype))
    whole = own[0] if len(own) == 1 else np.concatenate(own)
    if wanted.dim:
        count, _, *others = wanted.kind.shape
        pieces = in_pieces(whole, (count, len(whole), *others))
        return pieces[tuple(slice(None) if d == 1 else slice(*side) for d, side in enumerate(box))]
    return whole.reshape([stop - start for start, stop in box])


def _own_rows(wanted: Sequence[Wanted], seat: Seat) -> np.ndarray:
    """Numbers of the rows of which a worker holds some array, in order."""
    rows = [each.rows_in(box) for each in wanted if each.num_leading for box in own_boxes(each.kind, seat)]
    return np.unique(np.concatenate(rows)) if rows else np.arange(0)


def _runs(rows: np.ndarray) -> list[tuple[int, int]]:
    """Runs of consecutive numbers, as (first, last + 1)."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(rows, breaks) if len(run)]
