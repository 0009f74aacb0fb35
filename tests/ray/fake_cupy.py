"""As much of CuPy as a channel uses, on the memory of this process: what is sent lies in a wire until it is received."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import sys
import types
import weakref

import jax
import numpy as np


class Wire:
    """All communicators of a test.

    Attributes:
        calls: ("send" or "recv", rank, peer, bytes), in order.
        stopped: Whether what is begun now does not end.
        device: The number of the device that is current.
        rooms: Memory that CuPy handed out and that is still held.
        most_rooms: The most there were at a time.
    """

    def __init__(self):
        self.lanes = collections.defaultdict(collections.deque)
        self.calls, self.stopped, self.device = [], False, 0
        self.rooms, self.most_rooms = weakref.WeakSet(), 0
        self.ids = itertools.count(1)


class _Array(np.ndarray):
    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.ctypes.data)

    def __hash__(self):
        return id(self)

    def __eq__(self, other):
        return self is other


def install(monkeypatch) -> Wire:
    """Make `import cupy` find this."""
    wire = Wire()

    class Event:
        def __init__(self):
            self.stopped = wire.stopped

        @property
        def done(self):
            return not (self.stopped and wire.stopped)

    @contextlib.contextmanager
    def device(number):
        before, wire.device = wire.device, number
        yield
        wire.device = before

    class Stream(contextlib.nullcontext):
        ptr = 0

        def __init__(self, non_blocking):
            super().__init__()

        def record(self):
            return Event()

        def synchronize(self):
            pass

    class Communicator:
        def __init__(self, num_ranks, unique_id, rank):
            assert isinstance(unique_id, bytes), "ids are what `get_unique_id` gives"
            self.id, self.rank = unique_id, rank

        def send(self, pointer, num_bytes, kind, peer, stream):
            wire.calls.append(("send", self.rank, peer, num_bytes))
            wire.lanes[self.id, self.rank, peer].append(ctypes.string_at(pointer, num_bytes))

        def recv(self, pointer, num_bytes, kind, peer, stream):
            wire.calls.append(("recv", self.rank, peer, num_bytes))
            lane = wire.lanes[self.id, peer, self.rank]
            found = lane.popleft() if lane else bytes(num_bytes)  # it is sent later
            assert len(found) == num_bytes, "what is sent is what is received"
            ctypes.memmove(pointer, found, num_bytes)

    def empty(shape, dtype):
        room = np.empty(shape, dtype).view(_Array)
        wire.rooms.add(room)
        wire.most_rooms = max(wire.most_rooms, len(wire.rooms))
        return room

    cupy, cuda, nccl = (types.ModuleType(name) for name in ("cupy", "cupy.cuda", "cupy.cuda.nccl"))
    cupy.__spec__ = types.SimpleNamespace()
    cupy.cuda, cuda.nccl = cuda, nccl
    cupy.empty, cupy.from_dlpack = empty, lambda array: np.from_dlpack(array).view(_Array)
    cuda.Device, cuda.Stream = device, Stream
    nccl.available, nccl.NCCL_UINT8, nccl.NcclCommunicator = True, 1, Communicator
    nccl.groupStart = nccl.groupEnd = lambda: None
    nccl.get_unique_id = lambda: next(wire.ids).to_bytes(128)
    take = lambda room: jax.device_put(np.array(room), jax.devices()[wire.device])  # noqa: E731
    monkeypatch.setattr(jax.dlpack, "from_dlpack", take)
    for module in (cupy, cuda, nccl):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return wire
