"""Sends small parcels between workers through sockets, since a call of Ray costs a millisecond even for small ones.

In:     parcels: packed tiles, of a step and message.
Out:    the same parcels in the other worker's mailbox.
Method: each worker listens; a sender connects once. Both sides prove by HMAC that they know the job's secret word, which Ray
        distributed; the word itself is never sent over a socket. A thread per connection reads into memory that XLA:CPU uses
        without a copy. Large parcels go through Ray, whose memory the processes of a machine share, and so does everything
        for a worker that cannot be reached. A connection from a stranger occupies a thread for `GREET_SECONDS`.
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
"""Sends the parcel of (step, message, source) to another worker."""

LARGE_BYTES = 8 * 2**20
"""Larger parcels go through Ray."""
MOST_TILES = 2**16
"""And so do parcels of more tiles."""
GREET_SECONDS = 5.0
"""Time limit for a whole handshake."""
MOST_STRANGERS = 64
"""The most connections in their handshake at the same time."""
PAUSE_SECONDS = 0.1
"""Pause before the next try, when this process can open no more connections or threads."""
MOST_PIECES = 64
"""The most pieces of memory in one call of `sendmsg`, which takes at most 1024."""
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_HEAD = struct.Struct("<qqqq")
"""Step, message, source, number of tiles; followed by the sizes of the tiles, and the tiles."""


class Listener:
    """Receives the parcels for one worker.

    `port`: the port on which it listens; 0: none, since this host does not have the address that Ray knows it by.
    """

    def __init__(self, address: str, word: bytes, put: Post):
        """Listen for connections that know the word; parcels go to `put`."""
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
        """Stop listening, and end all its threads."""
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
            except OSError:  # no file descriptor is left, say: pending connections are accepted later
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
            with connection, contextlib.suppress(OSError):  # the driver reports a worker that is gone
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
    """Read so many tiles; sizes that no worker would send are refused before memory is allocated."""
    if not 0 <= count <= MOST_TILES:
        raise ConnectionError(f"{count} tiles")
    sizes = _read(connection, 8 * count).view(np.int64)
    if (sizes < 0).any() or (sizes > LARGE_BYTES).any() or sizes.sum() > LARGE_BYTES:
        raise ConnectionError(f"tiles of {sizes} bytes")
    return [_read(connection, int(size)) for size in sizes]


def make_post(address: tuple[str, int], word: bytes, through_ray: Post) -> Post:
    """The function that sends parcels to the worker at an address; any thread may call it."""
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
    """A connection to a worker that has proved to be of this job; None: there is none."""
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
    """The listener's side of the handshake; it challenges first, so it proves nothing to a stranger.

    Raises `OSError`: the other side does not know the word, is gone, or takes too long.
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
    """The sender's side of the handshake; on return, the listener is ready to read. Raises as `_welcome`."""
    deadline = time.monotonic() + GREET_SECONDS
    other = _read(connection, _NONCE_BYTES, deadline).tobytes()
    own = secrets.token_bytes(_NONCE_BYTES)
    _send_by(connection, own + _proof(word, b"sender", other, own), deadline)
    proof = _read(connection, _PROOF_BYTES, deadline).tobytes()
    if not hmac.compare_digest(proof, _proof(word, b"listener", other, own)):
        raise ConnectionError("a stranger")
    connection.settimeout(None)


def _proof(word: bytes, side: bytes, listeners: bytes, senders: bytes) -> bytes:
    """The proof that a side knows the word: the HMAC of its name and both nonces of this handshake."""
    return hmac.digest(word, side + listeners + senders, "sha256")


def _send_by(connection: socket.socket, data: bytes, deadline: float) -> None:
    connection.settimeout(max(deadline - time.monotonic(), 1e-3))
    connection.sendall(data)


def _send_all(connection: socket.socket, pieces: list[memoryview]) -> None:
    """Send all pieces, as many as possible in one call, so that the reader is woken once."""
    while pieces:
        count = connection.sendmsg(pieces[:MOST_PIECES])
        while pieces and count >= len(pieces[0]):
            count -= len(pieces.pop(0))
        if count:
            pieces[0] = pieces[0][count:]


def _read(connection: socket.socket, size: int, deadline: float | None = None) -> np.ndarray:
    """Read so many bytes, all by the deadline, if there is one."""
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
    """Wake the thread that waits on a connection; its owner closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
