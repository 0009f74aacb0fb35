"""Who sends what to whom: every element arrives once at each worker that wants it, whatever the meshes; no Ray needed."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from autopar.mesh import ArrayType, LogicalMesh, Sharding
from autopar.runtime.ray.seats import environment, seats_of
from autopar.runtime.ray.transport.parcels import holders_of, own_boxes, pack, parcels_of, slices, unpack
from tests.ray.kinds import DTYPES, SHAPE, kinds

MESHES = (LogicalMesh((1,)), LogicalMesh((2,)), LogicalMesh((3,)), LogicalMesh((2, 2)), LogicalMesh((4,)))


def test_seats():
    seats = seats_of(((0, 2), (2, 2), (4, 8)), devices_per_host=4)
    assert [str(s) for s in seats] == [
        "worker 0 (mesh 0, host 0)",
        "worker 1 (mesh 1, host 0)",
        "worker 2 (mesh 2, host 1)",
        "worker 3 (mesh 2, host 2)",
    ]
    assert [list(s.devices) for s in seats] == [[0, 1], [0, 1], [0, 1, 2, 3], [4, 5, 6, 7]]
    assert [s.rank for s in seats] == [0, 0, 0, 1]
    uneven = seats_of(((0, 3), (3, 5)), devices_per_host=4)
    assert [(s.mesh, s.host, s.first, s.count) for s in uneven] == [(0, 0, 0, 3), (1, 0, 0, 1), (1, 1, 1, 4)]


def test_environment():
    seat = seats_of(((0, 2),), 2)[0]
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    on_cpu = environment(seat, False, flags, True)
    assert on_cpu["XLA_FLAGS"].split() == [
        "--xla_backend_optimization_level=0",
        "--xla_force_host_platform_device_count=2",
    ]
    assert on_cpu["JAX_PLATFORMS"] == "cpu" and on_cpu["JAX_ENABLE_X64"] == "1" and "PJRT_NPROC" in on_cpu
    on_gpu = environment(seat, True, flags, False)
    assert on_gpu["JAX_PLATFORMS"] == "cuda,cpu" and "device_count" not in on_gpu["XLA_FLAGS"]


@pytest.mark.parametrize("source", MESHES, ids=str)
@pytest.mark.parametrize("target", MESHES, ids=str)
@pytest.mark.parametrize("devices_per_host", [1, 2, 8])
def test_parcels(source, target, devices_per_host):
    """Against brute force: what each worker wants is covered exactly once, out of what the senders hold."""
    seats = seats_of(((0, source.num_devices), (8, target.num_devices)), devices_per_host)
    sources, targets = ([s for s in seats if s.mesh == mesh] for mesh in (0, 1))
    for have, want in itertools.product(kinds(source), kinds(target)):
        parcels = parcels_of([have], [want], sources, targets)
        held = have.boxes()
        for seat in targets:
            arrived = np.zeros(SHAPE, int)
            for parcel in parcels:
                sender = seats[parcel.source]
                assert sender.mesh == 0
                for piece in parcel.pieces:
                    assert piece.device in sender.devices
                    assert all(
                        low <= start and stop <= high
                        for (start, stop), (low, high) in zip(piece.box, held[piece.device], strict=True)
                    )
                    if parcel.target == seat.number:
                        arrived[slices(piece.box, tuple((0, n) for n in SHAPE))] += 1
            wanted = np.zeros(SHAPE, int)
            for box in own_boxes(want, seat):
                wanted[slices(box, tuple((0, n) for n in SHAPE))] += 1
            np.testing.assert_array_equal(arrived, wanted)


def test_copies_take_turns():
    mesh = LogicalMesh((4,))
    whole, split = (ArrayType((8, 4), np.dtype("float32"), s, mesh) for s in shardings_of_two())
    seats = seats_of(((0, 4), (4, 4)), 1)
    parcels = parcels_of([whole], [split], seats[:4], seats[4:])
    assert sorted(parcel.source for parcel in parcels) == [0, 1, 2, 3]


def shardings_of_two():
    return Sharding(((), ())), Sharding((("x",), ()))


def test_what_is_handed_out():
    mesh = LogicalMesh((2, 2))
    kind = ArrayType((4, 4), np.dtype("float32"), Sharding((("y",), ())), mesh)
    seats = seats_of(((0, 4),), 2)
    assert holders_of(kind, seats) == {0: [(0, ((0, 2), (0, 4))), (1, ((2, 4), (0, 4)))]}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (3, 5)])
def test_pack(dtype, shape):
    array = np.asarray(jnp.asarray(np.random.default_rng(0).integers(0, 2, shape), dtype))
    data = pack(array)
    assert data.dtype == np.uint8 and data.nbytes == array.nbytes
    again = unpack(data, shape, array.dtype)
    assert again.shape == shape and again.dtype == array.dtype
    np.testing.assert_array_equal(again.astype(np.complex64), array.astype(np.complex64))
    if array.size:
        assert np.shares_memory(data, array)
