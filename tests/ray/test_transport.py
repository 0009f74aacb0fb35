"""Messages between workers, whose places are in this process: every dtype, any tiles, no Ray and no GPU needed."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import socket
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.mesh import ArrayType, LogicalMesh, Sharding
from autopar.runtime.ray.seats import seats_of
from autopar.runtime.ray.transport import sockets
from autopar.runtime.ray.transport.direct import AHEAD, Direct
from autopar.runtime.ray.transport.nccl import Begun
from autopar.runtime.ray.transport.parcels import Message, box_shape, parcels_of, slices
from autopar.runtime.ray.transport.sockets import LARGE_BYTES, Listener, make_post
from autopar.runtime.ray.transport.transport import Mailbox, ObjectStore, WaitError
from autopar.runtime.ray.worker.places import Places, aligned, on_devices
from autopar.streams.transfers import plan_transfer
from tests.patience import PATIENCE_SECONDS
from tests.ray.kinds import DTYPES, EMPTY, SHAPE, kinds

LISTENERS: list[Listener] = []


@pytest.fixture(autouse=True)
def nobody_listens_afterwards(monkeypatch):
    """No thread outlives its test; and what greets in time does so however busy this machine is."""
    monkeypatch.setattr(sockets, "GREET_SECONDS", PATIENCE_SECONDS)
    yield
    while LISTENERS:
        LISTENERS.pop().close()
    assert not [thread for thread in threading.enumerate() if thread.name in ("listener", "inbox")]


def listening(listener):
    """To be closed at the end of the test."""
    LISTENERS.append(listener)
    return listener


class Here(Places):
    """The devices of a worker, which are some of this process's."""

    def __init__(self, devices, seat):
        super().__init__(seat)
        self.all = devices

    def mesh(self, mesh):
        return jax.sharding.Mesh(np.array(self.all).reshape(mesh.shape), mesh.axis_names)

    def share(self, kind, value):
        """Its part of an array."""
        whole = tuple((0, length) for length in kind.shape)
        parts = [value[slices(kind.boxes()[d], whole)] for d in self.seat.devices]
        return self.sharer(kind)(parts)

    def sharer(self, kind):
        """As `putter`, where not all devices of the mesh are the worker's."""
        return lambda parts: Share(kind.shape, None, jax.device_put(parts, self.devices(kind)))


class Pipe:
    """A channel in one process, of all its workers: from device to device in the order in which was sent."""

    def __init__(self, devices):
        self.lanes, self.devices = collections.defaultdict(collections.deque), devices

    def rehearse(self, tiles, wanted):
        return [jax.device_put(np.zeros(w.shape, w.dtype), self.devices[w.target]) for w in wanted]

    def reserve(self, together):
        assert len(together) <= AHEAD + 1

    def send(self, message, tiles):
        for tile, source, target in tiles:
            self.lanes[source, target].append((message, tile))

    def receive(self, message, wanted):
        found = []
        for want in wanted:
            number, tile = self.lanes[want.source, want.target].popleft()
            assert (number, tile.shape, tile.dtype) == (message, want.shape, want.dtype)
            found.append(jax.device_put(np.array(tile), self.devices[want.target]))
        return found

    def wait(self, seconds, on_progress, behind=0):
        left = [Begun(lane[0][0], True, (target,)) for (_, target), lane in self.lanes.items() if lane]
        return left[0] if left and not behind else None


def sides_of(source, target, devices_per_host):
    """Workers of two meshes, and their devices, which are of this process."""
    seats = seats_of(((0, source.num_devices), (8, target.num_devices)), devices_per_host)
    sides = [jax.devices()[: source.num_devices], jax.devices()[-target.num_devices :]]
    return seats, sides, [Here(sides[seat.mesh], seat) for seat in seats]


def direct(source, target, wait_seconds=PATIENCE_SECONDS, devices_per_host=8):
    """The transport of GPUs, over a channel that is none of NCCL's."""
    seats, sides, places = sides_of(source, target, devices_per_host)
    owner = {mesh: {d: s.number for s in seats if s.mesh == mesh for d in s.devices} for mesh in (0, 1)}
    channels = {(0, 1): Pipe(sides[1])}
    made = [Direct(seat, place, channels, owner, wait_seconds) for seat, place in zip(seats, places, strict=True)]
    return seats, places, made


def through_store(source, target, wait_seconds=PATIENCE_SECONDS, devices_per_host=8):
    """The transport through Ray's object store, without Ray."""
    seats, _, places = sides_of(source, target, devices_per_host)
    boxes = [Mailbox() for _ in seats]

    def post(number):
        return lambda step, message, sender, tiles: boxes[number].put((step, message, sender), tiles)

    posts = {seat.number: post(seat.number) for seat in seats}
    made = [
        ObjectStore(seat, place, box, posts, wait_seconds)
        for seat, place, box in zip(seats, places, boxes, strict=True)
    ]
    return seats, places, made


def through_sockets(source, target, wait_seconds=PATIENCE_SECONDS, devices_per_host=8):
    """The same, over sockets."""
    seats, _, places = sides_of(source, target, devices_per_host)
    boxes = [Mailbox() for _ in seats]

    def put(box):
        return lambda step, message, sender, tiles: box.put((step, message, sender), tiles)

    listeners = [listening(Listener("127.0.0.1", b"word", put(box))) for box in boxes]
    posts = {n: make_post(("127.0.0.1", listener.port), b"word", None) for n, listener in enumerate(listeners)}
    made = [
        ObjectStore(seat, place, box, posts, wait_seconds)
        for seat, place, box in zip(seats, places, boxes, strict=True)
    ]
    return seats, places, made


def message_of(have, want, seats, overwritten=False, taken=False):
    parcels = parcels_of(have, want, [s for s in seats if s.mesh == 0], [s for s in seats if s.mesh == 1])
    count = len(have)
    return Message(0, 0, 1, 0, tuple(have), tuple(want), parcels, (overwritten,) * count, (taken,) * count)


ARRAYS = [*((dtype, SHAPE) for dtype in DTYPES), ("float32", EMPTY), ("int4", EMPTY)]
TARGETS = [LogicalMesh((3,)), LogicalMesh((4,))]


@pytest.mark.parametrize("transports", [through_store, through_sockets, direct])
@pytest.mark.parametrize(
    "dtype, shape, target",
    [
        *((dtype, shape, TARGETS[number % 2]) for number, (dtype, shape) in enumerate(ARRAYS)),
        ("float32", SHAPE, TARGETS[1]),
    ],
    ids=str,
)
def test_every_dtype(dtype, shape, target, transports):
    source = LogicalMesh((2, 2))
    seats, places, (sender, receiver) = transports(source, target)
    have, want = kinds(source, dtype, shape), kinds(target, dtype, shape)
    pairs = list(itertools.product(have, want))[:: 1 if dtype == "float32" else 5]
    message = message_of([a for a, _ in pairs], [b for _, b in pairs], seats)
    random = np.random.default_rng(1)
    values = [np.asarray(jnp.asarray(random.integers(0, 2, shape), dtype)) for _ in pairs]
    arrays = [jax.device_put(v, places[0].sharding(a)) for v, (a, _) in zip(values, pairs, strict=True)]
    send, receive = sender.sender(message), receiver.receivers([message])[0]
    for step in (3, 4):
        send(step, arrays)
        got = receive(step)
        sender.flush(lambda: None)
        for value, array, (_, kind) in zip(values, got, pairs, strict=True):
            assert array.sharding == places[1].sharding(kind) and array.dtype == value.dtype
            np.testing.assert_array_equal(np.asarray(array).astype(np.complex64), value.astype(np.complex64))


@pytest.mark.parametrize("overwritten, taken", [(False, False), (False, True), (True, False), (True, True)])
def test_copies_per_byte(overwritten, taken):
    """Parts that are cut along their first dim, or not at all, are copied once into the store and at most once out; once
    more where a program takes the sender's memory over. No copy goes uncounted: each has its own memory."""
    source, target = LogicalMesh((2,)), LogicalMesh((4,))
    seats, places, (sender, receiver) = through_store(source, target)
    first = Sharding((("x",), (), ()))
    kind, wanted = (ArrayType(SHAPE, np.dtype("float32"), first, mesh) for mesh in (source, target))
    message = message_of([kind], [wanted], seats, overwritten, taken)
    value = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    sender.sender(message)(0, [jax.device_put(value, places[0].sharding(kind))])
    got = receiver.receivers([message])[0](0)[0]
    sender.flush(lambda: None)
    np.testing.assert_array_equal(got, value)
    assert sender.sent_bytes == value.nbytes
    assert sender.copied_bytes == (2 if overwritten else 1) * value.nbytes
    assert receiver.copied_bytes == value.nbytes if taken else receiver.copied_bytes <= value.nbytes


class Share:
    """A worker's part of an array whose other parts are in other processes."""

    def __init__(self, shape, sharding, shards):
        self.shape, self.sharding = shape, sharding
        self.addressable_shards = [SimpleNamespace(device=s.device, data=s) for s in shards]


@pytest.mark.parametrize("transports", [through_store, through_sockets, direct])
@pytest.mark.parametrize("devices_per_host", [1, 2])
@pytest.mark.parametrize("shape", [SHAPE, (5, 7, 3), EMPTY], ids=str)
def test_meshes_of_several_processes(transports, devices_per_host, shape, monkeypatch):
    """Every worker gets what its devices want, also where a copy is handed on to a device of another process."""
    monkeypatch.setattr(jax, "make_array_from_single_device_arrays", Share)
    monkeypatch.setattr(Here, "putter", Here.sharer)
    monkeypatch.setattr(jax, "block_until_ready", lambda arrays: arrays)
    mesh = LogicalMesh((4,))
    seats, places, made = transports(mesh, mesh, devices_per_host=devices_per_host)
    assert len(seats) == 8 // devices_per_host
    split = [kind for kind in kinds(mesh, shape=shape) if kind.sharding.num_shards(mesh) == 1 or shape[0] % 4 == 0]
    have, want = (list(side) for side in zip(*itertools.product(split, split), strict=True))
    if transports is direct:  # there is no all-gather of shares
        alone = [plan_transfer(a, b).middle == b.sharding for a, b in zip(have, want, strict=True)]
        have, want = ([k for k, ok in zip(side, alone, strict=True) if ok] for side in (have, want))
    message = message_of(have, want, seats)
    value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    sends = [side.sender(message) for side, seat in zip(made, seats, strict=True) if seat.mesh == 0]
    receives = [side.receivers([message])[0] for side, seat in zip(made, seats, strict=True) if seat.mesh == 1]
    for send, place in zip(sends, places, strict=False):
        send(0, [place.share(kind, value) for kind in have])
    for receive, place in zip(receives, places[len(sends) :], strict=True):
        for kind, got in zip(want, receive(0), strict=True):
            assert [shard.device for shard in got.addressable_shards] == place.devices(kind)
            for shard, wanted in zip(got.addressable_shards, place.share(kind, value).addressable_shards, strict=True):
                np.testing.assert_array_equal(shard.data, wanted.data)
    for side in made:
        side.flush(lambda: None)


@pytest.mark.parametrize("transports", [through_store, through_sockets, direct])
def test_memory_that_is_taken_over_later(transports):
    """What was sent arrives as it was, also if the next program writes into the same memory at once."""
    mesh = LogicalMesh((2,))
    seats, places, (sender, receiver) = transports(mesh, mesh)
    kind = ArrayType((64, 64), np.dtype("float32"), Sharding((("x",), ())), mesh)
    message = message_of([kind], [kind], seats, overwritten=True, taken=True)
    negate = jax.jit(lambda x: -x, donate_argnums=0)
    send, receive = sender.sender(message), receiver.receivers([message])[0]
    for step in range(20):
        value = np.full((64, 64), step, np.float32)
        array = jax.device_put(value.copy(), places[0].sharding(kind))
        send(step, [array])
        negate(array)
        got = receive(step)[0]
        kept = np.array(got)
        negate(got)
        np.testing.assert_array_equal(kept, value)
    sender.flush(lambda: None)


def test_messages_that_are_wanted_in_another_order():
    """A channel carries them as they were sent; each is taken when it is wanted, again in the next step."""
    mesh = LogicalMesh((2,))
    seats, places, (sender, receiver) = direct(mesh, mesh)
    kind = kinds(mesh)[1]
    messages = [dataclasses.replace(message_of([kind], [kind], seats), number=n, turn=9 - n) for n in range(4)]
    sends = [sender.sender(m) for m in messages]
    receives = receiver.receivers(messages)
    for step in range(2):
        for number in (3, 2, 1, 0):
            value = np.full(SHAPE, 10 * step + number, np.float32)
            sends[number](step, [jax.device_put(value, places[0].sharding(kind))])
        for number in (1, 3, 0, 2):
            np.testing.assert_array_equal(receives[number](step)[0], np.full(SHAPE, 10 * step + number))
        receiver.flush(lambda: None)
    sends[0](2, [jax.device_put(np.zeros(SHAPE, np.float32), places[0].sharding(kind))])
    with pytest.raises(WaitError, match="waited 600 s for worker 1 to receive a message") as info:
        sender.flush(lambda: None)
    assert (info.value.peer, info.value.message) == (1, 0)


def test_a_message_that_does_not_come():
    mesh = LogicalMesh((2,))
    seats, _, (_, receiver) = through_store(mesh, mesh, wait_seconds=0.2)
    message = message_of(kinds(mesh), kinds(mesh), seats)
    with pytest.raises(WaitError, match="waited 0 s for a message of worker 0"):
        receiver.receivers([message])[0](0)


LARGE = (120, 240, 5)
"""What is small leaves at once, in the thread that sends it."""


def test_what_is_small_and_there_leaves_at_once():
    mesh = LogicalMesh((2,))
    seats, places, (sender, receiver) = through_store(mesh, mesh)
    for shape in (SHAPE, LARGE):
        kind = kinds(mesh, shape=shape)[0]
        message, value = message_of([kind], [kind], seats), np.ones(shape, np.float32)
        array = jax.block_until_ready(jax.device_put(value, places[0].sharding(kind)))
        sender.sender(message)(shape[0], [array])
        assert bool(sender._leaving) == (shape is LARGE)
        np.testing.assert_array_equal(receiver.receivers([message])[0](shape[0])[0], value)
    sender.flush(lambda: None)


def test_a_message_that_does_not_leave():
    """Its receiver does not take it in: the sender says which message, and who."""
    mesh = LogicalMesh((2,))
    seats, places, (sender, _) = through_store(mesh, mesh, wait_seconds=0.2)
    taken_in = threading.Event()
    sender._peers = {1: lambda *parcel: taken_in.wait(PATIENCE_SECONDS)}
    kind = kinds(mesh, shape=LARGE)[0]
    message = dataclasses.replace(message_of([kind], [kind], seats), number=5)
    sender.sender(message)(0, [jax.device_put(np.zeros(LARGE, np.float32), places[0].sharding(kind))])
    with pytest.raises(WaitError, match="waited 0 s for worker 1 to receive a message") as info:
        sender.flush(lambda: None)
    assert (info.value.peer, info.value.message) == (1, 5)
    taken_in.set()


def test_an_error_of_the_sending_thread_is_told():
    mesh = LogicalMesh((2,))
    seats, places, (sender, _) = through_store(mesh, mesh)
    sender._peers = {1: lambda *parcel: 1 / 0}
    kind = kinds(mesh, shape=LARGE)[0]
    sender.sender(message_of([kind], [kind], seats))(
        0, [jax.device_put(np.zeros(LARGE, "f4"), places[0].sharding(kind))]
    )
    with pytest.raises(ZeroDivisionError):
        sender.flush(lambda: None)


def test_parcels_go_through_ray_where_sockets_do_not_serve():
    """What is large, what is for a worker that is not reached or has gone; a stranger is not heard."""
    box, other_way = Mailbox(), []
    listener = listening(
        Listener("127.0.0.1", b"word", lambda step, message, _, tiles: box.put((step, message), tiles))
    )

    def post_to(port, word):
        return make_post(("127.0.0.1", port), word, lambda step, *more: other_way.append(step))

    post, tile = post_to(listener.port, b"word"), np.arange(100, dtype=np.uint8)
    post(0, 7, 1, [tile, tile[:0], tile[:3]])
    for got, want in zip(box.take((0, 7), PATIENCE_SECONDS), [tile, tile[:0], tile[:3]], strict=True):
        np.testing.assert_array_equal(got, want)
    assert not other_way
    post(1, 7, 1, [np.zeros(LARGE_BYTES + 1, np.uint8)])
    assert other_way == [1]
    post_to(listener.port, b"wort")(2, 7, 1, [tile])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    post_to(port, b"word")(3, 7, 1, [tile])
    nowhere = Listener("192.0.2.1", b"word", None)  # an address that is no one's
    post_to(nowhere.port, b"word")(4, 7, 1, [tile])
    assert other_way == [1, 2, 3, 4] and nowhere.port == 0


def test_mailbox_waits():
    box, key = Mailbox(), (7, 0, 1)
    threading.Timer(0.1, lambda: box.put(key, 1)).start()
    assert box.take(key, PATIENCE_SECONDS) == 1 and box.take(key, 0.0) is None


def test_a_step_that_is_left_leaves_nothing():
    box = Mailbox()
    box.put((7, 0, 1), "before")
    box.leave(7)
    box.put((7, 1, 1), "behind")
    assert box.take((7, 0, 1), 0.0) is None and box.take((7, 1, 1), 0.0) is None
    box.put((8, 0, 1), "next")
    assert box.take((8, 0, 1), 0.0) == "next"


def test_own_memory():
    """Two devices that hold the same part share the host's memory only if no program takes it over."""
    mesh = LogicalMesh((2,))
    seat = seats_of(((0, 2),), 2)[0]
    kind = ArrayType((64,), np.dtype("float32"), Sharding(((),)), mesh)
    part = aligned((64,), kind.dtype)
    part[:] = 1.0
    array = on_devices(kind, Here(jax.devices()[:2], seat), own_memory=True)([part])
    jax.block_until_ready(array)
    part[:] = 2.0
    np.testing.assert_array_equal(array, np.ones(64))
    assert box_shape(((2, 5), (0, 7))) == (3, 7)
