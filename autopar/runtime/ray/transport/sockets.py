"""Parcels from worker to worker through sockets: a call of Ray's costs a millisecond, however small they are.

In:     parcels: packed tiles, of a step and message.
Out:    the same in the other worker's mailbox.
Method: each worker listens. Who sends to it connects once; both show that they are of the same job by what only those can make
        who know a word that Ray brought to all: the word itself goes over no socket. A thread per connection reads, into
        memory that XLA:CPU takes as it is. What is large goes through Ray, whose memory is shared by the processes of a
        machine; so does all that is for a worker that cannot be reached. A stranger costs a thread for `GREET_SECONDS`.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from autopar.runtime.ray.transport.transport import aligned

Post = Callable[[int, int, int, Sequence[np.ndarray]], None]
"""Gives another worker the parcel of (step, message, source)."""

LARGE_BYTES = 8 * 2**20
"""Parcels of more go through Ray."""
MOST_TILES = 2**16
"""So do those of more tiles."""
GREET_SECONDS = 5.0
"""How long the whole of a greeting may take."""
MOST_STRANGERS = 64
"""How many may be greeting at the same time."""
PAUSE_SECONDS = 0.1
"""How long to wait for others to close something, where this process can open nothing more."""
MOST_PIECES = 64
"""How many pieces of memory are handed to the system at once: it takes no more than 1024."""
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_HEAD = struct.Struct("<qqqq")
"""Step, message, source, number of tiles; behind it their sizes, and they."""


class Listener:
    """Takes in the parcels for one worker.

    Attributes:
        port: Where it listens; 0: nowhere, for this host does not have the address that it is known by.
    """

    def __init__(self, address: str, word: bytes, put: Post):
        """Listen, to those who know the word; `put` takes what comes."""
        self._word, self._put, self.port = word, put, 0
        self._closing = threading.Event()
        self._one_at_a_time = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._num_strangers = 0
        with contextlib.suppress(OSError):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._server = socket.create_server((address, 0), family=family)
            self.port = self._server.getsockname()[1]
            self._thread = threading.Thread(target=self._accept, daemon=True, name="listener")
            self._thread.start()

    def close(self) -> None:
        """Take in nothing more, and end its threads."""
        if not self.port or self._closing.is_set():
            return
        self._closing.set()
        _shut(self._server)
        self._thread.join()
        self._server.close()
        with self._one_at_a_time:
            left = dict(self._open)
        for connection, thread in left.items():
            _shut(connection)
            thread.join()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._server.accept()
            except OSError:  # no descriptor is left, or the like: those in line are taken when there is one again
                self._closing.wait(PAUSE_SECONDS)
                continue
            try:
                self._take(connection)
            except (RuntimeError, MemoryError):  # no thread can be started
                connection.close()
                self._closing.wait(PAUSE_SECONDS)

    def _take(self, connection: socket.socket) -> None:
        thread = threading.Thread(target=self._read, args=(connection,), daemon=True, name="inbox")
        with self._one_at_a_time:
            if self._num_strangers >= MOST_STRANGERS:
                connection.close()
                return
            self._open[connection] = thread
            self._num_strangers += 1
        try:
            thread.start()
        except BaseException:
            self._forget(connection, was_stranger=True)
            raise

    def _forget(self, connection: socket.socket, was_stranger: bool) -> None:
        with self._one_at_a_time:
            self._open.pop(connection, None)
            self._num_strangers -= was_stranger

    def _read(self, connection: socket.socket) -> None:
        is_stranger = True
        try:
            with connection, contextlib.suppress(OSError):  # of one that has gone the driver tells
                _welcome(connection, self._word)
                with self._one_at_a_time:
                    is_stranger = False
                    self._num_strangers -= 1
                while True:
                    step, message, source, count = _HEAD.unpack(_read(connection, _HEAD.size).data)
                    self._put(step, message, source, _tiles(connection, count))
        finally:
            self._forget(connection, was_stranger=is_stranger)


def _tiles(connection: socket.socket, count: int) -> list[np.ndarray]:
    """What is too much is told before there is memory for it: no worker sends it."""
    if not 0 <= count <= MOST_TILES:
        raise ConnectionError(f"{count} tiles")
    sizes = _read(connection, 8 * count).view(np.int64)
    if (sizes < 0).any() or (sizes > LARGE_BYTES).any() or sizes.sum() > LARGE_BYTES:
        raise ConnectionError(f"tiles of {sizes} bytes")
    return [_read(connection, int(size)) for size in sizes]


def make_post(address: tuple[str, int], word: bytes, through_ray: Post) -> Post:
    """How parcels get to a worker that listens there and wants to hear the word; any thread may call it."""
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
        if sizes.sum() > LARGE_BYTES or len(tiles) > MOST_TILES or not is_sent(head, tiles):
            through_ray(step, message, source, tiles)

    return post


def _connected(address: tuple[str, int], word: bytes) -> socket.socket | None:
    """A connection to one who has shown that it is of this job; None: there is none."""
    try:
        connection = socket.create_connection(address, GREET_SECONDS)
    except OSError:
        return None
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _greet(connection, word)
    except OSError:
        connection.close()
        return None
    return connection


def _welcome(connection: socket.socket, word: bytes) -> None:
    """The side of who listens: it asks first, so that it answers no one who does not know the word.

    Raises:
        OSError: The other does not know the word, has gone, or takes too long.
    """
    deadline = time.monotonic() + GREET_SECONDS
    own = secrets.token_bytes(_NONCE_BYTES)
    _send_by(connection, own, deadline)
    told = _read(connection, _NONCE_BYTES + _PROOF_BYTES, deadline).tobytes()
    other, proof = told[:_NONCE_BYTES], told[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(word, b"sender", own, other)):
        raise ConnectionError("a stranger")
    _send_by(connection, _proof(word, b"listener", own, other), deadline)
    connection.settimeout(None)


def _greet(connection: socket.socket, word: bytes) -> None:
    """The side of who connects; when it returns the other is ready to read. Raises as `_welcome`."""
    deadline = time.monotonic() + GREET_SECONDS
    other = _read(connection, _NONCE_BYTES, deadline).tobytes()
    own = secrets.token_bytes(_NONCE_BYTES)
    _send_by(connection, own + _proof(word, b"sender", other, own), deadline)
    proof = _read(connection, _PROOF_BYTES, deadline).tobytes()
    if not hmac.compare_digest(proof, _proof(word, b"listener", other, own)):
        raise ConnectionError("a stranger")
    connection.settimeout(None)


def _proof(word: bytes, side: bytes, listeners: bytes, senders: bytes) -> bytes:
    """What only those can make who know the word, of what each side has made up for this greeting."""
    return hmac.digest(word, side + listeners + senders, "sha256")


def _send_by(connection: socket.socket, data: bytes, deadline: float) -> None:
    connection.settimeout(max(deadline - time.monotonic(), 1e-3))
    connection.sendall(data)


def _send_all(connection: socket.socket, pieces: list[memoryview]) -> None:
    """Together as far as they go: a reader that is woken by the first finds the others there."""
    while pieces:
        count = connection.sendmsg(pieces[:MOST_PIECES])
        while pieces and count >= len(pieces[0]):
            count -= len(pieces.pop(0))
        if count:
            pieces[0] = pieces[0][count:]


def _read(connection: socket.socket, size: int, deadline: float | None = None) -> np.ndarray:
    """So many bytes; all of them by the deadline, where there is one."""
    room = aligned((size,), np.dtype(np.uint8))
    view, at = room.data, 0
    while at < size:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        count = connection.recv_into(view[at:])
        if not count or (deadline is not None and time.monotonic() > deadline):
            raise ConnectionError("closed, or too slow")
        at += count
    return room


def _shut(connection: socket.socket) -> None:
    """Wake who waits for it; it is closed by who owns it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
