"""A channel between two meshes of GPUs: NCCL, called through CuPy.

In:     tiles as JAX arrays; for each channel an id that all its processes share.
Out:    tiles as JAX arrays, on the other side.
Method: one communicator per channel, whose ranks are the devices of the sending mesh, then those of the receiving; one
        stream per rank. DLPack passes memory without copies and makes streams wait for each other, the host waits for
        nothing. Memory is held until what was begun with it is done. CuPy is imported after JAX has started, so that
        both have the same libnccl.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.runtime.ray.direct import Wanted

POLL_SECONDS = 1e-4
_PLAIN = frozenset(
    "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128".split()
)
"""Dtypes that DLPack has on both sides; others travel as integers of their size."""
_INTEGER = {1: jnp.uint8, 2: jnp.uint16}


def can_use_nccl() -> bool:
    """Whether this process has CuPy with NCCL."""
    if importlib.util.find_spec("cupy") is None:
        return False
    from cupy.cuda import nccl

    return bool(nccl.available)


def new_id() -> tuple[int, ...]:
    """An id for one channel; all of its workers must open it with the same."""
    from cupy.cuda import nccl

    return tuple(nccl.get_unique_id())


class NcclChannel:
    """The ranks of one worker in one channel."""

    def __init__(self, unique_id: tuple[int, ...], num_sources: int, num_ranks: int, own: Mapping[int, jax.Device]):
        """Join the communicator; returns when all ranks have.

        Args:
            unique_id: Of the channel.
            num_sources: Devices of the sending mesh.
            num_ranks: Devices of both meshes.
            own: This worker's devices by rank.
        """
        import cupy
        from cupy.cuda import nccl

        self._cupy, self._nccl, self._num_sources = cupy, nccl, num_sources
        self._streams: dict[int, Any] = {}
        self._comms: dict[int, Any] = {}
        self._begun: list[tuple[Any, Any]] = []
        nccl.groupStart()
        for rank, device in own.items():
            with cupy.cuda.Device(device.local_hardware_id):
                self._streams[rank] = cupy.cuda.Stream(non_blocking=True)
                self._comms[rank] = nccl.NcclCommunicator(num_ranks, unique_id, rank)
        nccl.groupEnd()
        self._own = dict(own)

    def send(self, tiles: Sequence[tuple[jax.Array, int, int]]) -> None:
        """As of `Channel`."""
        views = []
        for tile, source, _ in tiles:
            with self._on(source):
                views.append(self._cupy.from_dlpack(_as_plain(tile)))  # the stream waits for the tile
        self._nccl.groupStart()
        for view, (_, source, target) in zip(views, tiles, strict=True):
            peer, stream = self._num_sources + target, self._streams[source]
            self._comms[source].send(view.data.ptr, view.nbytes, self._nccl.NCCL_UINT8, peer, stream.ptr)
        self._nccl.groupEnd()
        self._hold({source for _, source, _ in tiles}, (views, tiles))

    def receive(self, wanted: Sequence[Wanted]) -> list[jax.Array]:
        """As of `Channel`."""
        rooms, ranks = [], [self._num_sources + w.target for w in wanted]
        for want, rank in zip(wanted, ranks, strict=True):
            with self._on(rank):
                rooms.append(self._cupy.empty(want.shape, _plain(want.dtype)))
        self._nccl.groupStart()
        for want, rank, room in zip(wanted, ranks, rooms, strict=True):
            stream = self._streams[rank]
            self._comms[rank].recv(room.data.ptr, room.nbytes, self._nccl.NCCL_UINT8, want.source, stream.ptr)
        self._nccl.groupEnd()
        found = []
        for want, rank, room in zip(wanted, ranks, rooms, strict=True):
            with self._on(rank):
                array = jax.dlpack.from_dlpack(room)  # programs wait for the stream
            found.append(_as_wanted(array, want.dtype))
        # CuPy would give the memory to the next message while a program still reads it: kept until the step ends.
        self._hold(set(ranks), rooms)
        return found

    def wait(self, seconds: float) -> bool:
        """As of `Channel`."""
        deadline = time.monotonic() + seconds
        for event, _ in self._begun:
            while not event.done:
                if time.monotonic() > deadline:
                    return False
                time.sleep(POLL_SECONDS)
        self._begun.clear()
        return True

    def _on(self, rank: int) -> Any:
        # CuPy's streams belong to the device that was current when they were made, and make it current again.
        return _Both(self._cupy.cuda.Device(self._own[rank].local_hardware_id), self._streams[rank])

    def _hold(self, ranks: set[int], what: Any) -> None:
        for rank in sorted(ranks):
            with self._on(rank):
                self._begun.append((self._streams[rank].record(), what))


class _Both:
    def __init__(self, device: Any, stream: Any):
        self._device, self._stream = device, stream

    def __enter__(self) -> None:
        self._device.__enter__()
        self._stream.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._stream.__exit__(*error)
        self._device.__exit__(*error)


def _plain(dtype: np.dtype) -> Any:
    return dtype if dtype.name in _PLAIN else np.dtype(_INTEGER[dtype.itemsize])


def _as_plain(tile: jax.Array) -> jax.Array:
    if tile.dtype.name in _PLAIN:
        return tile
    if tile.dtype == jnp.bool_ or tile.dtype.name.endswith("int4"):
        return tile.astype(jnp.uint8)
    return lax.bitcast_convert_type(tile, _INTEGER[tile.dtype.itemsize])


def _as_wanted(tile: jax.Array, dtype: np.dtype) -> jax.Array:
    if dtype.name in _PLAIN:
        return tile
    if dtype == jnp.bool_ or dtype.name.endswith("int4"):
        return tile.astype(dtype)
    return lax.bitcast_convert_type(tile, dtype)
