"""The channel of GPUs over a CuPy that is none: what is held how long, what is prepared, what is told; no GPU needed."""

from __future__ import annotations

import dataclasses
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.errors import ClusterError, WorkerError
from autopar.mesh import ArrayType, LogicalMesh, Sharding
from autopar.mesh.ray_nodes import RayHost
from autopar.runtime.ray.driver.workers import Workers
from autopar.runtime.ray.seats import by_mesh, environment, seats_of
from autopar.runtime.ray.share import Share
from autopar.runtime.ray.transport import nccl
from autopar.runtime.ray.transport.direct import AHEAD, Direct
from autopar.runtime.ray.transport.nccl import Begun, NcclChannel, Wanted, can_use_nccl, new_id
from autopar.runtime.ray.transport.transport import WaitError
from autopar.runtime.ray.worker.worker import Worker
from autopar.streams.instructions import Recv, Run, Send
from tests.ray import fake_cupy
from tests.ray.kinds import DTYPES, EMPTY, SHAPE, kinds
from tests.ray.test_transport import Here, message_of

MICROBATCHES = 16


@pytest.fixture
def wire(monkeypatch):
    return fake_cupy.install(monkeypatch)


def two_ends():
    """A channel from device 0 to device 1, as its two workers have it."""
    unique_id = new_id()
    return [NcclChannel(unique_id, 1, 2, {rank: gpu(jax.devices()[rank])}) for rank in range(2)]


def gpu(device):
    return SimpleNamespace(local_hardware_id=device.id)


def both_sides(wait_seconds=5.0):
    """Workers on two devices each, which send to each other through the fake."""
    seats, unique_id = seats_of(((0, 2), (2, 2)), 8), new_id()
    sides = [jax.devices()[:2], jax.devices()[2:4]]
    ends = [
        NcclChannel(unique_id, 2, 4, {2 * side + k: gpu(device) for k, device in enumerate(own)})
        for side, own in enumerate(sides)
    ]
    owner = {seat.mesh: dict.fromkeys(seat.devices, seat.number) for seat in seats}
    places = [Here(side, seat) for side, seat in zip(sides, seats, strict=True)]
    made = [Direct(s, p, {(0, 1): end}, owner, wait_seconds) for s, p, end in zip(seats, places, ends, strict=True)]
    return seats, places, made, ends


def messages(seats, want, have, count=MICROBATCHES):
    return [dataclasses.replace(message_of(have, want, seats), number=n, turn=n) for n in range(count)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(wire, dtype):
    sender, receiver = two_ends()
    value = jnp.asarray(np.random.default_rng(0).integers(0, 2, (7, 3)), dtype)
    sender.send(0, [(value, 0, 0)])
    (got,) = receiver.receive(0, [Wanted((7, 3), np.dtype(value.dtype), 0, 0)])
    assert got.dtype == value.dtype
    np.testing.assert_array_equal(*(np.asarray(x).astype(np.complex64) for x in (got, value)))


def test_every_pair_is_connected_before_the_first_step(wire):
    assert can_use_nccl()
    both_sides()
    pairs = [(source, target) for source in (0, 1) for target in (2, 3)]
    assert sorted(call[1:3] for call in wire.calls if call[0] == "send") == pairs
    assert sorted(call[2:0:-1] for call in wire.calls if call[0] == "recv") == pairs
    assert {call[3] for call in wire.calls} == {1}
    assert environment(seats_of(((0, 1),), 1)[0], True, "", False)["CUDA_MODULE_LOADING"] == "EAGER"


def test_memory_is_held_for_few_messages(wire):
    """What is done is let go of while the step goes on."""
    seats, places, (sender, receiver), ends = both_sides()
    kind = ArrayType((64, 8), np.dtype("float32"), Sharding((("x",), ())), LogicalMesh((2,)))
    made = messages(seats, [kind], [kind])
    sends, receives = [sender.sender(m) for m in made], receiver.receivers(made)
    reserved = wire.most_rooms
    for number in range(MICROBATCHES):
        value = np.full((64, 8), number, np.float32)
        sends[number](0, [jax.device_put(value, places[0].sharding(kind))])
        np.testing.assert_array_equal(receives[number](0)[0], value)
        assert all(len(end._begun) <= AHEAD + 1 for end in ends)
    assert wire.most_rooms == reserved, "there was room for them before the first"
    for side in (sender, receiver):
        side.flush(lambda: None)
    assert not any(end._begun for end in ends)


def test_the_first_step_prepares_nothing(wire):
    """Cut, joined, gathered and converted has been before: nothing is compiled in a step."""
    seats, places, (sender, receiver), _ = both_sides()
    mesh = LogicalMesh((2,))
    have = [kind for dtype in ("bfloat16", "float32", "int4") for kind in kinds(mesh, dtype)[1:]]
    want = [
        kind for dtype in ("bfloat16", "float32", "int4") for kind in (*kinds(mesh, dtype)[:1], kinds(mesh, dtype)[1])
    ]
    made = messages(seats, want, have, 3)
    sends, receives = [sender.sender(m) for m in made], receiver.receivers(made)
    random = np.random.default_rng(0)
    values = [jnp.asarray(random.integers(0, 2, SHAPE), k.dtype) for k in have]
    arrays = [jax.device_put(v, places[0].sharding(k)) for v, k in zip(values, have, strict=True)]
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, _, **more: compiled.append(name) if "backend_compile" in name else None
    )
    sends[0](0, arrays)
    got = receives[0](0)
    seen = list(compiled)
    jax.jit(lambda x: x + 0.123)(1.0)
    assert len(compiled) > len(seen) == 0, "none in the step, and it would have been noticed"
    for value, array, kind in zip(values, got, want, strict=True):
        assert array.sharding == places[1].sharding(kind)
        np.testing.assert_array_equal(np.asarray(array).astype(float), np.asarray(value).astype(float))


def test_nothing_is_sent_of_empty_arrays(wire):
    seats, places, (sender, receiver), _ = both_sides()
    mesh = LogicalMesh((2,))
    have, want = kinds(mesh, shape=EMPTY), kinds(mesh, shape=EMPTY)
    made = messages(seats, want, have, 1)
    send, receive = sender.sender(made[0]), receiver.receivers(made)[0]
    before = len(wire.calls)
    send(0, [jax.device_put(np.zeros(EMPTY, np.float32), places[0].sharding(k)) for k in have])
    assert [x.shape for x in receive(0)] == [EMPTY] * len(want) and len(wire.calls) == before


def test_the_first_that_is_late_is_told(wire):
    """Each message has its time after the one before it; who receives it, and where in the stream it is sent, is said."""
    seats, places, (sender, _), (end, _) = both_sides(wait_seconds=0.2)
    kind = kinds(LogicalMesh((2,)))[1]
    made = messages(seats, [kind], [kind], 8)
    sends = [sender.sender(m) for m in made]
    array = jax.device_put(np.zeros(SHAPE, np.float32), places[0].sharding(kind))
    for number in range(5):
        wire.stopped = number >= 3
        sends[number](0, [array])
    assert [held.begun for held in end._begun] == [Begun(number, True, (0, 1)) for number in (3, 4)]
    with pytest.raises(WaitError, match="waited 0 s for worker 1 to receive a message") as info:
        sender.flush(lambda: None)
    assert (info.value.message, info.value.peer) == (3, 1)

    stream = (Run("stage0/F", 0, 0), Send((0,), 1, 2), Run("stage0/F", 0, 1), Send((1,), 1, 3), Recv((2,), 1, 9))
    worker = Worker(seats[0], 0.2)
    worker._stand(len(stream))
    error = worker._failure(info.value, Share((), stream, {}, {}, (0, 0, 1, 1, -1), {}, (), (), ()), 5)
    assert isinstance(error, WorkerError) and error.instruction == str(stream[3]) and error.microbatch == 1
    assert error.waited_for == 1


def test_each_has_its_time_after_the_one_before(wire, monkeypatch):
    """A step may be long; what counts is that it comes on."""
    sender, _ = two_ends()
    wire.stopped = True
    for number in range(3):
        sender.send(number, [(jnp.ones(3), 0, 0)])
    clock, events, progress = [0.0], [held.events[0] for held in sender._begun], []

    def sleep(seconds):
        clock[0] += seconds
        for number, event in enumerate(events):
            event.stopped = clock[0] < 0.4 * (number + 1)

    monkeypatch.setattr(nccl, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    assert sender.wait(1.0, lambda: progress.append(1)) is None
    assert clock[0] > 1.0 and len(progress) == 3


def test_receiving_waits_for_what_is_far_behind(wire):
    """A worker that goes on is never more than so many messages ahead of what has come."""
    seats, _, (_, receiver), (_, end) = both_sides(wait_seconds=0.2)
    kind = kinds(LogicalMesh((2,)))[1]
    receives = receiver.receivers(messages(seats, [kind], [kind]))
    wire.stopped = True
    for number in range(AHEAD):
        receives[number](0)
    with pytest.raises(WaitError, match="for a message of worker 0") as info:
        receives[AHEAD](0)
    assert info.value.message == 0 and len(end._begun) == AHEAD + 1


def test_a_worker_joins_as_it_is_told(monkeypatch):
    """Nothing is left to JAX's own look at the environment, which under Slurm finds another job's numbers."""
    told = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **options: told.append((args, options)))
    seat = seats_of(((0, 8),), 4)[1]
    Worker(seat, 1.0).join("10.0.0.1:5000", 2)
    options = {"local_device_ids": range(4), "cluster_detection_method": "deactivate"}
    options["coordinator_bind_address"] = "10.0.0.1:5000"
    assert told == [(("10.0.0.1:5000", 2, 1), options)]


def test_workers_meet_at_the_address_that_they_are_told():
    """And nowhere else: a node that does not have it is an error."""
    worker = Worker(seats_of(((0, 8),), 4)[0], 1.0)
    host, port = worker.coordinator("127.0.0.1").split(":")
    assert host == "127.0.0.1" and int(port) > 0
    with pytest.raises(ClusterError, match="(?s)192.0.2.1.*node-ip-address"):
        worker.coordinator("192.0.2.1")


@pytest.mark.parametrize("layout, warns", [(((0, 2), (2, 2)), True), (((0, 4),), False)])
def test_a_node_without_cupy_is_named(layout, warns):
    """One is enough to put every message on the object store; where there are no messages it does not matter."""
    workers = object.__new__(Workers)
    workers.seats = seats_of(layout, 2)
    workers._of_mesh = by_mesh(workers.seats)
    workers._machine = SimpleNamespace(hosts=[RayHost("a", "10.0.0.1"), RayHost("b", "10.0.0.2")])
    workers.prepare = lambda method, arguments: {0: True, 1: False}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert not workers._can_go_direct({0: (), 1: ()})
    assert [("10.0.0.2;" in str(w.message), "10.0.0.1" in str(w.message)) for w in found] == [(True, False)] * warns
