"""A channel between two meshes of GPUs, by NCCL through CuPy.

In:     tiles as JAX arrays; an id for each channel, the same in all its processes.
Out:    tiles as JAX arrays, on the other side.
Method: one communicator per channel, whose ranks are the devices of the sending mesh, then those of the receiving mesh; one
        stream per rank. DLPack passes memory without copies and makes streams wait for each other; the host never waits.
        Arrived tiles are copied into XLA's memory, so that few receive buffers are needed, and are reused. Memory is held
        until the operations on it are done; each message checks that for the messages before it. CuPy is imported after JAX
        has started, so that both use the same libnccl.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.runtime.ray.transport.plain import as_plain, from_plain, plain_dtype

POLL_SECONDS = 1e-4
NcclId = bytes | tuple[int, ...]
"""As CuPy gives it, and takes nothing else: bytes since version 14."""


def can_use_nccl() -> bool:
    """Whether this process has CuPy with NCCL."""
    if importlib.util.find_spec("cupy") is None:
        return False
    from cupy.cuda import nccl

    return bool(nccl.available)


def new_id() -> NcclId:
    """A new id for one channel; all its workers must open it with the same id."""
    from cupy.cuda import nccl

    found: NcclId = nccl.get_unique_id()
    return found


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tile to receive: its source device in the sending mesh, and its target device in the receiving mesh."""

    shape: tuple[int, ...]
    dtype: np.dtype
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Begun:
    """A message in flight, sent or received by this worker; `others`: the devices of the other mesh that take part."""

    message: int
    is_sent: bool
    others: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Held:
    """The memory of a message, held until NCCL (`events`) and programs (`tokens`) are done with it."""

    begun: Begun
    events: tuple[Any, ...]
    tokens: tuple[jax.Array, ...]
    memory: Any

    def is_done(self) -> bool:
        return all(event.done for event in self.events) and all(token.is_ready() for token in self.tokens)


class NcclChannel:
    """One worker's end of a channel from one mesh to another: its ranks. Devices are given by their numbers in their mesh."""

    def __init__(self, unique_id: NcclId, num_sources: int, num_ranks: int, own: Mapping[int, jax.Device]):
        """Join the communicator, and connect every source with every target; returns when all ranks have done so.

        The first `num_sources` ranks are the devices of the sending mesh. `own`: this worker's devices, by rank.
        """
        import cupy
        from cupy.cuda import nccl

        self._cupy, self._nccl, self._num_sources = cupy, nccl, num_sources
        self._streams: dict[int, Any] = {}
        self._comms: dict[int, Any] = {}
        self._begun: deque[_Held] = deque()
        self._own = dict(own)
        nccl.groupStart()
        for rank, device in own.items():
            with cupy.cuda.Device(device.local_hardware_id):
                self._streams[rank] = cupy.cuda.Stream(non_blocking=True)
                self._comms[rank] = nccl.NcclCommunicator(num_ranks, unique_id, rank)
        nccl.groupEnd()
        self._connect(range(num_sources), range(num_sources, num_ranks))

    def _connect(self, sources: range, targets: range) -> None:
        """Send one byte from every source to every target, since connecting during a step could wait for spinning kernels."""
        rooms = {}
        for rank in self._own:
            with self._on(rank):
                rooms[rank] = self._cupy.empty(max(len(sources), len(targets)), np.uint8)
        self._nccl.groupStart()
        for source in sources:
            for target in targets:
                if source in self._own:
                    self._call("send", source, rooms[source].data.ptr, 1, target)
                if target in self._own:
                    self._call("recv", target, rooms[target].data.ptr + source, 1, source)
        self._nccl.groupEnd()
        for rank in self._own:
            self._streams[rank].synchronize()

    def rehearse(self, tiles: Sequence[jax.Array], wanted: Sequence[Wanted]) -> list[jax.Array]:
        """Prepare to send these tiles and receive those wanted; sends nothing, and returns arrays with arbitrary content."""
        jax.block_until_ready([as_plain(tile) for tile in tiles])
        return [self._taken_in(want, room)[0] for want, room in zip(wanted, self._rooms(wanted), strict=True)]

    def reserve(self, together: Sequence[Sequence[Wanted]]) -> None:
        """Reserve memory for messages that may be in flight at the same time."""
        rooms = [self._rooms(wanted) for wanted in together]
        rooms.clear()  # returns the memory to CuPy's pool, which keeps it

    def send(self, message: int, tiles: Sequence[tuple[jax.Array, int, int]]) -> None:
        """Start to send tiles, as one group: (tile, source device, target device)."""
        self._let_go()
        views = []
        for tile, source, _ in tiles:
            with self._on(source):
                views.append(self._cupy.from_dlpack(as_plain(tile)))  # makes the stream wait for the tile
        self._nccl.groupStart()
        for view, (_, source, target) in zip(views, tiles, strict=True):
            self._call("send", source, view.data.ptr, view.nbytes, self._num_sources + target)
        self._nccl.groupEnd()
        others = tuple(dict.fromkeys(target for _, _, target in tiles))
        events = self._events(source for _, source, _ in tiles)
        self._begun.append(_Held(Begun(message, True, others), events, (), (views, tiles)))

    def receive(self, message: int, wanted: Sequence[Wanted]) -> list[jax.Array]:
        """Start to receive tiles, as one group, into new memory; programs that read them wait for their arrival."""
        self._let_go()
        rooms = self._rooms(wanted)
        self._nccl.groupStart()
        for want, room in zip(wanted, rooms, strict=True):
            self._call("recv", self._num_sources + want.target, room.data.ptr, room.nbytes, want.source)
        self._nccl.groupEnd()
        events = self._events(self._num_sources + want.target for want in wanted)
        found = [self._taken_in(want, room) for want, room in zip(wanted, rooms, strict=True)]
        others = tuple(dict.fromkeys(want.source for want in wanted))
        # CuPy would give the buffer to the next message while a program still reads it, so it is held until the program ends.
        self._begun.append(_Held(Begun(message, False, others), events, tuple(token for _, token in found), rooms))
        return [array for array, _ in found]

    def wait(self, seconds: float, on_progress: Callable[[], None], behind: int = 0) -> Begun | None:
        """Wait until all messages but the last `behind` are done; each may take so many seconds after the one before it.

        Returns the message that was not done in time; None: all were.
        """
        deadline = time.monotonic() + seconds
        while len(self._begun) > behind:
            if self._begun[0].is_done():
                self._begun.popleft()
                on_progress()
                deadline = time.monotonic() + seconds
            elif time.monotonic() > deadline:
                return self._begun[0].begun
            else:
                time.sleep(POLL_SECONDS)
        return None

    def _let_go(self) -> None:
        while self._begun and self._begun[0].is_done():
            self._begun.popleft()

    def _rooms(self, wanted: Sequence[Wanted]) -> list[Any]:
        found = []
        for want in wanted:
            with self._on(self._num_sources + want.target):
                found.append(self._cupy.empty(want.shape, plain_dtype(want.dtype)))
        return found

    def _taken_in(self, want: Wanted, room: Any) -> tuple[jax.Array, jax.Array]:
        """The content of a receive buffer, copied to XLA's memory, and a token that is ready when the buffer may be reused."""
        with self._on(self._num_sources + want.target):
            array = jax.dlpack.from_dlpack(room)  # makes programs wait for the stream
        return _copied_as(want.dtype, array)

    def _call(self, name: str, rank: int, pointer: int, num_bytes: int, peer: int) -> None:
        getattr(self._comms[rank], name)(pointer, num_bytes, self._nccl.NCCL_UINT8, peer, self._streams[rank].ptr)

    @contextlib.contextmanager
    def _on(self, rank: int) -> Iterator[None]:
        # A CuPy stream belongs to the device that was current at its creation, which must be current when it is used.
        with self._cupy.cuda.Device(self._own[rank].local_hardware_id), self._streams[rank]:
            yield

    def _events(self, ranks: Any) -> tuple[Any, ...]:
        found = []
        for rank in sorted(set(ranks)):
            with self._on(rank):
                found.append(self._streams[rank].record())
        return tuple(found)


@functools.partial(jax.jit, static_argnums=0)
def _copied_as(dtype: np.dtype, tile: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A copy of the tile in its own dtype, and a token that is ready when the program has read the tile."""
    return jnp.array(from_plain(tile, dtype), copy=True), jnp.zeros((), jnp.int8)
