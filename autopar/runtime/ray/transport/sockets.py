"""Parcels from worker to worker through sockets: a call of Ray's costs a millisecond, however small they are.

In:     parcels: packed tiles, of a step and message.
Out:    the same in the other worker's mailbox.
Method: each worker listens. Who sends to it connects once, and shows that it is of the same job by a word that Ray brought to
        all. A thread per connection reads, into memory that XLA:CPU takes as it is. What is large goes through Ray, whose
        memory is shared by the processes of a machine; so does all that is for a worker that cannot be reached.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import threading
from collections.abc import Callable, Sequence

import numpy as np

from autopar.runtime.ray.transport.transport import aligned

Post = Callable[[int, int, int, Sequence[np.ndarray]], None]
"""Gives another worker the parcel of (step, message, source)."""

LARGE_BYTES = 8 * 2**20
"""Parcels of more go through Ray."""
CONNECT_SECONDS = 5.0
_HEAD = struct.Struct("<qqqq")
"""Step, message, source, number of tiles; behind it their sizes, and they."""
MOST_PIECES = 64
"""How many pieces of memory are handed to the system at once: it takes no more than 1024."""


class Listener:
    """Takes in the parcels for one worker.

    Attributes:
        port: Where it listens; 0: nowhere, for this host does not have the address that it is known by.
    """

    def __init__(self, address: str, word: bytes, put: Post):
        """Listen.

        Args:
            address: Of this host.
            word: What those who connect must say.
            put: Takes what comes.
        """
        self._word, self._put, self.port = word, put, 0
        with contextlib.suppress(OSError):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            server = socket.create_server((address, 0), family=family)
            self.port = server.getsockname()[1]
            threading.Thread(target=self._accept, args=(server,), daemon=True, name="listener").start()

    def _accept(self, server: socket.socket) -> None:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=self._read, args=(connection,), daemon=True, name="inbox").start()

    def _read(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # of one that has gone the driver tells
            connection.settimeout(CONNECT_SECONDS)
            if not hmac.compare_digest(_read(connection, len(self._word)).tobytes(), self._word):
                return
            connection.settimeout(None)
            while True:
                step, message, source, count = _HEAD.unpack(_read(connection, _HEAD.size).data)
                sizes = _read(connection, 8 * count).view(np.int64)
                self._put(step, message, source, [_read(connection, int(size)) for size in sizes])


def make_post(address: tuple[str, int], word: bytes, through_ray: Post) -> Post:
    """How parcels get to a worker; any thread may call it.

    Args:
        address: Where it listens.
        word: What it wants to hear.
        through_ray: The other way.
    """
    ways: list[socket.socket | None] = []
    one_at_a_time = threading.Lock()

    def is_sent(head: bytes, tiles: Sequence[np.ndarray]) -> bool:
        with one_at_a_time:
            if not ways:
                ways.append(_connected(address, word))
            connection = ways[0]
            if connection is None:
                return False
            try:
                _send_all(connection, [memoryview(head), *(tile.data for tile in tiles if tile.nbytes)])
            except OSError:
                ways[0] = None
            return ways[0] is not None

    def post(step: int, message: int, source: int, tiles: Sequence[np.ndarray]) -> None:
        sizes = np.array([tile.nbytes for tile in tiles], np.int64)
        head = _HEAD.pack(step, message, source, len(tiles)) + sizes.tobytes()
        if sizes.sum() > LARGE_BYTES or not is_sent(head, tiles):
            through_ray(step, message, source, tiles)

    return post


def _connected(address: tuple[str, int], word: bytes) -> socket.socket | None:
    try:
        connection = socket.create_connection(address, CONNECT_SECONDS)
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(word)
    except OSError:
        return None
    return connection


def _send_all(connection: socket.socket, pieces: list[memoryview]) -> None:
    """Together as far as they go: a reader that is woken by the first finds the others there."""
    while pieces:
        count = connection.sendmsg(pieces[:MOST_PIECES])
        while pieces and count >= len(pieces[0]):
            count -= len(pieces.pop(0))
        if count:
            pieces[0] = pieces[0][count:]


def _read(connection: socket.socket, size: int) -> np.ndarray:
    room = aligned((size,), np.dtype(np.uint8))
    view, at = room.data, 0
    while at < size:
        count = connection.recv_into(view[at:])
        if not count:
            raise ConnectionError("closed")
        at += count
    return room
