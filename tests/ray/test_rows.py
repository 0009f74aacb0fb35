"""Which rows a worker reads, without workers."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.mesh import ArrayType, LogicalMesh, Sharding
from autopar.runtime.ray.rows import Wanted, count_portions, cut_out, portions_for
from autopar.runtime.ray.seats import seats_of
from autopar.runtime.ray.transport.parcels import own_boxes

ROWS = 16
CASES = {
    "over hosts": ((8,), (("x",), ()), False, 2, {0: (0,), 1: (1,), 2: (2,), 3: (3,)}),
    "over pairs of hosts": ((2, 4), (("x",), ()), False, 2, {0: (0,), 1: (0,), 2: (1,), 3: (1,)}),
    "whole on every host": ((8,), ((), ("x",)), False, 2, dict.fromkeys(range(4), (0,))),
    "in turns": ((2, 4), (("y",), ()), False, 2, {0: (0,), 1: (1,), 2: (0,), 3: (1,)}),
    "one host": ((8,), (("x",), ()), False, 8, {0: (0,)}),
    "microbatches": ((4,), ((), ("x",), ()), True, 2, {0: (0, 2, 4, 6), 1: (1, 3, 5, 7)}),
    "microbatches, whole": ((4,), ((), (), ("x",)), True, 2, {0: (0,), 1: (0,)}),
}


@pytest.mark.parametrize("name", CASES)
def test_parts(name):
    """As few as there can be, and of them each device's piece."""
    shape, dims, is_piece, per_host, want = CASES[name]
    mesh = LogicalMesh(shape)
    whole = np.arange(ROWS * 4, dtype=np.float32).reshape(ROWS, 4)
    lies = whole.reshape(4, ROWS // 4, 4) if is_piece else whole
    wanted = Wanted(0, ArrayType(lies.shape, lies.dtype, Sharding(dims), mesh), is_piece)
    number = Wanted(1, ArrayType((), np.dtype(np.float32), Sharding(()), mesh), False)
    seats = seats_of(((0, mesh.num_devices),), per_host)
    count = count_portions(ROWS, [((wanted, number), seat) for seat in seats])
    assert {seat.number: portions_for(ROWS, count, (wanted, number), seat) for seat in seats} == want
    read = np.split(whole, count)
    for seat in seats:
        parts = {k: read[k] for k in want[seat.number]}
        for box in own_boxes(wanted.kind, seat):
            np.testing.assert_array_equal(cut_out(wanted, box, parts), lies[tuple(slice(*side) for side in box)])
        assert cut_out(number, (), {k: np.float32(7) for k in parts}) == 7


def test_parts_of_a_stack_of_batches():
    """Microbatches split the samples of each step, and a worker reads whole steps."""
    mesh, steps, samples, count = LogicalMesh((4,)), 6, 8, 2
    whole = np.arange(steps * samples * 4, dtype=np.float32).reshape(steps, samples, 4)
    lies = whole.reshape(steps, count, samples // count, 4).swapaxes(0, 1)
    for dims in (((), (), ("x",), ()), ((), (), (), ("x",))):
        wanted = Wanted(0, ArrayType(lies.shape, lies.dtype, Sharding(dims), mesh), True, dim=1)
        seats = seats_of(((0, mesh.num_devices),), 2)
        number = count_portions(steps, [((wanted,), seat) for seat in seats])
        assert [portions_for(steps, number, (wanted,), seat) for seat in seats] == [(0,), (0,)]
        for seat in seats:
            for box in own_boxes(wanted.kind, seat):
                np.testing.assert_array_equal(
                    cut_out(wanted, box, {0: whole}), lies[tuple(slice(*side) for side in box)]
                )
