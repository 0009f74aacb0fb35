"""Who sends what to whom: every element arrives once at each worker that wants it, whatever the meshes; no Ray needed."""

from __future__ import annotations

import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.mesh import LogicalMesh, Sharding
from autopar.runtime.ray.job import BufferType
from autopar.runtime.ray.parcels import Message, box_shape, holders_of, own_boxes, pack, parcels_of, slices, unpack
from autopar.runtime.ray.seats import environment, seats_of
from autopar.runtime.ray.transport import Mailbox, ObjectStore, WaitError, aligned, on_devices

MESHES = (LogicalMesh((1,)), LogicalMesh((2,)), LogicalMesh((3,)), LogicalMesh((2, 2)), LogicalMesh((4,)))
DTYPES = ("float32", "bfloat16", "float16", "bool", "int32", "uint8", "float8_e4m3fn", "complex64", "int4")
SHAPE = (12, 24, 5)


def shardings(mesh):
    """Every way to split the first two dims."""
    names = mesh.axis_names
    ways = [((), (), ()), ((names[0],), (), ()), ((), (names[0],), ())]
    if len(names) == 2:
        ways += [(names, (), ()), ((names[0],), (names[1],), ()), ((names[1],), (names[0],), ())]
    return [Sharding(way) for way in ways]


def kinds(mesh, dtype="float32"):
    return [BufferType(SHAPE, np.dtype(jnp.dtype(dtype)), sharding, mesh) for sharding in shardings(mesh)]


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
    assert "JAX_PLATFORMS" not in on_gpu and "device_count" not in on_gpu["XLA_FLAGS"]


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
    whole, split = (BufferType((8, 4), np.dtype("float32"), s, mesh) for s in shardings_of_two())
    seats = seats_of(((0, 4), (4, 4)), 1)
    parcels = parcels_of([whole], [split], seats[:4], seats[4:])
    assert sorted(parcel.source for parcel in parcels) == [0, 1, 2, 3]


def shardings_of_two():
    return Sharding(((), ())), Sharding((("x",), ()))


def test_what_is_handed_out():
    mesh = LogicalMesh((2, 2))
    kind = BufferType((4, 4), np.dtype("float32"), Sharding((("y",), ())), mesh)
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


# The transport, its workers in one process.


class Here:
    """The devices of a worker, which are some of this process's."""

    def __init__(self, devices, seat):
        self.all, self.seat = devices, seat

    def devices(self, kind):
        return [self.all[d] for d in self.seat.devices]

    def sharding(self, kind):
        mesh = jax.sharding.Mesh(np.array(self.all).reshape(kind.mesh.shape), kind.mesh.axis_names)
        return kind.on(mesh)


def transports(source, target, wait_seconds=20.0):
    seats = seats_of(((0, source.num_devices), (8, target.num_devices)), 8)
    sides = [jax.devices()[: source.num_devices], jax.devices()[-target.num_devices :]]
    boxes = [Mailbox() for _ in seats]

    def post(number):
        return lambda step, message, sender, tiles: boxes[number].put((step, message, sender), tiles)

    posts = {seat.number: post(seat.number) for seat in seats}
    places = [Here(side, seat) for side, seat in zip(sides, seats, strict=True)]
    made = [
        ObjectStore(seat, place, box, posts, wait_seconds)
        for seat, place, box in zip(seats, places, boxes, strict=True)
    ]
    return seats, places, made


def message_of(have, want, seats, overwritten=False, taken=False):
    parcels = parcels_of(have, want, seats[:1], seats[1:])
    count = len(have)
    return Message(0, 0, 1, tuple(have), tuple(want), parcels, (overwritten,) * count, (taken,) * count)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype):
    source, target = LogicalMesh((2, 2)), LogicalMesh((3,))
    seats, places, (sender, receiver) = transports(source, target)
    have, want = kinds(source, dtype), kinds(target, dtype)
    pairs = list(itertools.product(have, want))
    message = message_of([a for a, _ in pairs], [b for _, b in pairs], seats)
    random = np.random.default_rng(1)
    values = [np.asarray(jnp.asarray(random.integers(0, 2, SHAPE), dtype)) for _ in pairs]
    arrays = [jax.device_put(v, places[0].sharding(a)) for v, (a, _) in zip(values, pairs, strict=True)]
    send, receive = sender.sender(message), receiver.receiver(message)
    for step in (3, 4):
        send(step, arrays)
        got = receive(step)
        sender.flush()
        for value, array, (_, kind) in zip(values, got, pairs, strict=True):
            assert array.sharding == places[1].sharding(kind) and array.dtype == value.dtype
            np.testing.assert_array_equal(np.asarray(array).astype(np.complex64), value.astype(np.complex64))


@pytest.mark.parametrize("taken", [False, True])
def test_copies_per_byte(taken):
    """Parts that are cut along their first dim, or not at all, are copied once into the store and at most once out."""
    source, target = LogicalMesh((2,)), LogicalMesh((4,))
    seats, places, (sender, receiver) = transports(source, target)
    first = Sharding((("x",), (), ()))
    kind, wanted = (BufferType(SHAPE, np.dtype("float32"), first, mesh) for mesh in (source, target))
    message = message_of([kind], [wanted], seats, taken=taken)
    value = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    sender.sender(message)(0, [jax.device_put(value, places[0].sharding(kind))])
    got = receiver.receiver(message)(0)[0]
    sender.flush()
    np.testing.assert_array_equal(got, value)
    assert sender.sent_bytes == value.nbytes
    assert sender.copied_bytes + receiver.copied_bytes <= 2 * value.nbytes


def test_memory_that_is_taken_over_later():
    """What was sent arrives as it was, also if the next program writes into the same memory at once."""
    mesh = LogicalMesh((2,))
    seats, places, (sender, receiver) = transports(mesh, mesh)
    kind = BufferType((64, 64), np.dtype("float32"), Sharding((("x",), ())), mesh)
    message = message_of([kind], [kind], seats, overwritten=True, taken=True)
    negate = jax.jit(lambda x: -x, donate_argnums=0)
    send, receive = sender.sender(message), receiver.receiver(message)
    for step in range(20):
        value = np.full((64, 64), step, np.float32)
        array = jax.device_put(value.copy(), places[0].sharding(kind))
        send(step, [array])
        negate(array)
        got = receive(step)[0]
        kept = np.array(got)
        negate(got)
        np.testing.assert_array_equal(kept, value)
    sender.flush()


def test_a_message_that_does_not_come():
    mesh = LogicalMesh((2,))
    seats, _, (_, receiver) = transports(mesh, mesh, wait_seconds=0.2)
    message = message_of(kinds(mesh), kinds(mesh), seats)
    with pytest.raises(WaitError, match="waited 0 s for a message of worker 0"):
        receiver.receiver(message)(0)


def test_an_error_of_the_sending_thread_is_told():
    mesh = LogicalMesh((2,))
    seats, places, (sender, _) = transports(mesh, mesh)
    sender._peers = {1: lambda *parcel: 1 / 0}
    kind = kinds(mesh)[0]
    sender.sender(message_of([kind], [kind], seats))(
        0, [jax.device_put(np.zeros(SHAPE, "f4"), places[0].sharding(kind))]
    )
    with pytest.raises(ZeroDivisionError):
        sender.flush()


def test_mailbox_waits():
    box = Mailbox()
    threading.Timer(0.1, lambda: box.put("a", 1)).start()
    assert box.take("a", 5.0) == 1 and box.take("a", 0.0) is None


def test_own_memory():
    """Two devices that hold the same part share the host's memory only if no program takes it over."""
    mesh = LogicalMesh((2,))
    seat = seats_of(((0, 2),), 2)[0]
    kind = BufferType((64,), np.dtype("float32"), Sharding(((),)), mesh)
    part = aligned((64,), kind.dtype)
    part[:] = 1.0
    array = on_devices(kind, seat, Here(jax.devices()[:2], seat), own_memory=True)([part])
    jax.block_until_ready(array)
    part[:] = 2.0
    np.testing.assert_array_equal(array, np.ones(64))
    assert box_shape(((2, 5), (0, 7))) == (3, 7)
