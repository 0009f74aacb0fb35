"""Sends messages from worker to worker.

In:     values on the devices of the sender; a `Message` (`parcels.py`).
Out:    the same values on the devices of the receiver.
Method: `direct.py` sends from GPU to GPU. `ObjectStore` sends tiles to a peer through a socket (`sockets.py`), or large ones
        as arguments of a call of its actor, through Ray's shared memory. On CPU, NumPy reads an array without a copy; a tile
        is copied into the socket or store, and out of it only if several tiles make one part, or a program overwrites the
        part.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import jax
import numpy as np

from autopar.mesh import Box
from autopar.runtime.acts import Receive, SendTo
from autopar.runtime.ray.seats import Seat
from autopar.runtime.ray.transport.parcels import Message, Piece, box_shape, own_boxes, pack, slices, unpack
from autopar.runtime.ray.worker.places import ALIGNMENT_BYTES, Places, aligned, on_devices
from autopar.runtime.transfer import shards_by_device

SMALL_BYTES = 64 * 2**10
"""Messages up to this size whose values are computed are sent at once, since they fit into a socket's buffer."""


class Transport(Protocol):
    """Sends and receives messages for one worker; called by its dispatching thread only.

    Attributes:
        sent_bytes: Bytes sent to other workers.
        copied_bytes: Bytes copied in memory for that; each copy counts.
    """

    sent_bytes: int
    copied_bytes: int

    def sender(self, message: Message) -> SendTo:
        """The function that sends this worker's share of a message."""
        ...

    def receivers(self, messages: Sequence[Message]) -> dict[int, Receive]:
        """The functions that receive this worker's share of messages, by number; they raise `WaitError` after the limit."""
        ...

    def flush(self, on_progress: Callable[[], None]) -> None:
        """Wait until all messages have been sent; `on_progress` is called after each.

        Raises `Exception`: sending failed.
        """
        ...


class WaitError(Exception):
    """A message was not received or sent in time.

    Attributes:
        peer: The worker that should have sent or received it; the first of several.
        message: Its number; None: the message at the worker's position.
    """

    def __init__(self, peers: Sequence[int], seconds: float, message: int | None = None, is_sent: bool = False):
        names = f"worker{'s' * (len(peers) > 1)} {', '.join(map(str, peers))}"
        what = f"{names} to receive a message" if is_sent else f"a message of {names}"
        super().__init__(f"it waited {seconds:.0f} s for {what}")
        self.peer, self.message = peers[0], message


class Mailbox:
    """Parcels that have arrived and are not taken yet, by (step, message, source).

    `came`: when the parcels taken had arrived; 0.0: not in time.
    """

    def __init__(self) -> None:
        self._parcels: dict[Any, tuple[Any, float]] = {}
        self._changed = threading.Condition()
        self._left = -1
        self.came: dict[Any, float] = {}

    def put(self, key: Any, parcel: Any) -> None:
        """Add a parcel that has arrived, unless its step was abandoned."""
        with self._changed:
            if key[0] > self._left:
                self._parcels[key] = parcel, time.perf_counter()
                self._changed.notify_all()

    def take(self, key: Any, seconds: float) -> Any:
        """Wait for a parcel, and take it; None: it did not arrive in time."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._parcels, seconds)
            parcel, self.came[key] = self._parcels.pop(key, (None, 0.0))
            return parcel

    def leave(self, step: int) -> None:
        """Drop the parcels of an abandoned step, including those that arrive later."""
        with self._changed:
            self._left = step
            self._parcels = {key: parcel for key, parcel in self._parcels.items() if key[0] > step}


class ObjectStore:
    """A transport through host memory, by sockets and Ray; attributes as in `Transport`."""

    def __init__(self, seat: Seat, places: Places, mailbox: Mailbox, peers: Mapping[int, Any], wait_seconds: float):
        """Of one worker; `peers`: functions (step, message, source, tiles) that put into the mailboxes of others."""
        self._seat, self._places, self._mailbox, self._peers = seat, places, mailbox, peers
        self._wait_seconds = wait_seconds
        self._outbox = ThreadPoolExecutor(1, thread_name_prefix="outbox")
        self._leaving: list[tuple[Message, Future]] = []
        self._counting = threading.Lock()
        self.sent_bytes = self.copied_bytes = 0

    def sender(self, message: Message) -> SendTo:
        """As in `Transport`."""
        devices = [self._places.devices(kind) for kind in message.sent]
        held = [kind.boxes() for kind in message.sent]
        parcels = [
            (parcel.target, [_cut(piece, held[piece.value][piece.device], self._seat) for piece in parcel.pieces])
            for parcel in message.parcels
            if parcel.source == self._seat.number
        ]

        is_small = sum(kind.num_bytes for kind in message.sent) <= SMALL_BYTES

        def send(step: int, arrays: Sequence[jax.Array]) -> None:
            shards, ready = [], []
            for array, own, overwritten in zip(arrays, devices, message.overwritten, strict=True):
                data = shards_by_device(array)
                # A program that overwrites the memory may be dispatched before the other thread has read it.
                shards.append([np.array(data[d]) if overwritten else data[d] for d in own])
                ready.append([data[d] for d in own])
                self._count(copied=sum(shard.nbytes for shard in shards[-1]) if overwritten else 0)
            is_idle = not self._leaving or self._leaving[-1][1].done()
            if is_small and is_idle and all(shard.is_ready() for own in ready for shard in own):
                leave(step, shards)  # faster than waking the other thread
            else:
                self._leaving.append((message, self._outbox.submit(leave, step, shards)))

        def leave(step: int, shards: Sequence[Sequence[Any]]) -> None:
            for target, cuts in parcels:
                tiles = []
                for value, device, part in cuts:
                    view = np.asarray(shards[value][device])
                    tiles.append(pack(view if part is None else view[part]))
                    size = tiles[-1].nbytes
                    self._count(size, copied=size if np.shares_memory(tiles[-1], view) else 2 * size)
                self._peers[target](step, message.number, self._seat.number, tiles)

        return send

    def receivers(self, messages: Sequence[Message]) -> dict[int, Receive]:
        """As in `Transport`."""
        return {message.number: self._receiver(message) for message in messages}

    def _receiver(self, message: Message) -> Receive:
        boxes = [own_boxes(kind, self._seat) for kind in message.received]
        parcels = [
            (parcel.source, [_paste(piece, boxes[piece.value]) for piece in parcel.pieces])
            for parcel in message.parcels
            if parcel.target == self._seat.number
        ]
        finish = [
            on_devices(kind, self._places, taken) for kind, taken in zip(message.received, message.taken, strict=True)
        ]
        taken_bytes = sum(
            math.prod(box_shape(kind.boxes()[device])) * kind.dtype.itemsize
            for kind, taken in zip(message.received, message.taken, strict=True)
            for device in (self._seat.devices if taken else ())
        )

        def receive(step: int) -> list[jax.Array]:
            parts: list[list[Any]] = [
                [None if math.prod(box_shape(box)) else np.empty(box_shape(box), kind.dtype) for box in own]
                for own, kind in zip(boxes, message.received, strict=True)
            ]
            for source, pastes in parcels:
                tiles = self._mailbox.take((step, message.number, source), self._wait_seconds)
                if tiles is None:
                    raise WaitError([source], self._wait_seconds)
                for (value, at, box, part), data in zip(pastes, tiles, strict=True):
                    dtype = message.received[value].dtype
                    tile = unpack(data, box_shape(box), dtype)
                    if part is None:
                        parts[value][at] = tile
                        by_xla = tile.ctypes.data % ALIGNMENT_BYTES and not message.taken[value]
                        self._count(copied=tile.nbytes if by_xla else 0)
                        continue
                    if parts[value][at] is None:
                        parts[value][at] = aligned(box_shape(boxes[value][at]), dtype)
                    parts[value][at][part] = tile
                    self._count(copied=tile.nbytes)
            self._count(copied=taken_bytes)
            return [put(own) for put, own in zip(finish, parts, strict=True)]

        return receive

    def _count(self, sent: int = 0, copied: int = 0) -> None:
        """Count bytes; called by both threads."""
        with self._counting:
            self.sent_bytes, self.copied_bytes = self.sent_bytes + sent, self.copied_bytes + copied

    def flush(self, on_progress: Callable[[], None]) -> None:
        """As in `Transport`."""
        for message, future in self._leaving:
            try:
                future.result(self._wait_seconds)
            except TimeoutError:
                if future.done():
                    raise  # an error of the system in sending, not this limit
                targets = [parcel.target for parcel in message.parcels if parcel.source == self._seat.number]
                raise WaitError(targets, self._wait_seconds, message.number, is_sent=True) from None
            on_progress()
        self._leaving.clear()


def _cut(piece: Piece, held: Box, seat: Seat) -> tuple[int, int, tuple[slice, ...] | None]:
    """(value, the worker's device, the slice of its part to send; None: all of it)."""
    return piece.value, piece.device - seat.first, None if piece.box == held else slices(piece.box, held)


def _paste(piece: Piece, wanted: Sequence[Box]) -> tuple[int, int, Box, tuple[slice, ...] | None]:
    """(value, the worker's part of it, the tile's box, its slice in the part; None: the whole part)."""
    at = next(
        k
        for k, box in enumerate(wanted)
        if all(low <= start and stop <= high for (start, stop), (low, high) in zip(piece.box, box, strict=True))
    )
    return piece.value, at, piece.box, None if piece.box == wanted[at] else slices(piece.box, wanted[at])
