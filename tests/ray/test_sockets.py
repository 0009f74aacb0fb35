"""Who listens for parcels: it outlives strangers, a lack of descriptors, and nonsense. Real sockets, on 127.0.0.1."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import threading

import numpy as np
import pytest

import autopar
from autopar.runtime.ray.transport import sockets
from autopar.runtime.ray.transport.sockets import LARGE_BYTES, MOST_TILES, Listener, _connected, _greet, make_post
from autopar.runtime.ray.transport.transport import Mailbox
from tests.patience import PATIENCE_SECONDS
from tests.ray.cluster import make_cluster
from tests.small_mlp import make_batch, make_params, train_step

WORD = b"word" * 8
TILES = [np.arange(100, dtype=np.uint8), np.zeros(0, np.uint8), np.arange(3, dtype=np.uint8)]


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """What is to come in time comes in time, however busy this machine is."""
    monkeypatch.setattr(sockets, "GREET_SECONDS", PATIENCE_SECONDS)


@pytest.fixture
def box():
    return Mailbox()


@pytest.fixture
def listener(box):
    made = Listener("127.0.0.1", WORD, lambda step, message, source, tiles: box.put((step, message), tiles))
    yield made
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name in ("listener", "inbox")]


def stranger(listener):
    return contextlib.closing(socket.create_connection(("127.0.0.1", listener.port), PATIENCE_SECONDS))


def is_closed(connection):
    """Waits for it; what was sent before is read."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(2**10):
            pass
    return True


def check_serves(listener, box, step):
    """A parcel of one who knows the word comes through."""
    post = make_post(("127.0.0.1", listener.port), WORD, None)
    post(step, 7, 1, TILES)
    for got, want in zip(box.take((step, 7), PATIENCE_SECONDS), TILES, strict=True):
        np.testing.assert_array_equal(got, want)


def test_no_descriptor_is_left(listener, box):
    """Who connects then waits in line, and is served when there is one again."""
    waited, wait = threading.Event(), listener._closing.wait
    listener._closing.wait = lambda seconds: waited.set() or wait(seconds)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken, late = [], socket.socket()
    late.settimeout(PATIENCE_SECONDS)
    highest = max(int(name) for name in os.listdir("/dev/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 4, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(late.fileno()))
        late.connect(("127.0.0.1", listener.port))
        assert waited.wait(PATIENCE_SECONDS), "it has noticed"
    finally:
        for one in taken:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with contextlib.closing(late):
        _greet(late, WORD)
    check_serves(listener, box, 1)


def test_no_thread_can_be_started(listener, box, monkeypatch):
    start, failed = threading.Thread.start, []

    def fails_once(self):
        if self.name == "inbox" and not failed:
            failed.append(self)
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", fails_once)
    with stranger(listener) as connection:
        assert is_closed(connection)
    check_serves(listener, box, 1)


def test_a_stranger_that_drips(listener, box, monkeypatch):
    """The limit is for the whole greeting, not for each byte of it."""
    monkeypatch.setattr(sockets, "GREET_SECONDS", 0.2)
    with stranger(listener) as connection:
        connection.settimeout(0.02)
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 64:
                try:
                    if not connection.recv(2**10):
                        break
                except TimeoutError:
                    sent += connection.send(b"x")
    assert sent < 64, "a whole greeting was heard"
    monkeypatch.setattr(sockets, "GREET_SECONDS", PATIENCE_SECONDS)
    check_serves(listener, box, 1)


def test_too_many_strangers(listener, box, monkeypatch):
    monkeypatch.setattr(sockets, "MOST_STRANGERS", 2)
    with stranger(listener) as first, stranger(listener) as second:
        assert len(first.recv(1)) == len(second.recv(1)) == 1
        with stranger(listener) as third:
            assert is_closed(third)
    for thread in [thread for thread in threading.enumerate() if thread.name == "inbox"]:
        thread.join(PATIENCE_SECONDS)
    check_serves(listener, box, 1)


@pytest.mark.parametrize(
    "count, sizes",
    [
        (2**60, []),
        (-1, []),
        (MOST_TILES + 1, []),
        (1, [2**60]),
        (1, [-1]),
        (1, [LARGE_BYTES + 1]),
        (2, [LARGE_BYTES, 1]),
        (2, [2**63 - 1, 2**63 - 1]),
    ],
)
def test_counts_that_no_worker_sends(listener, box, count, sizes):
    """It hangs up before there is memory for them."""
    with stranger(listener) as connection:
        _greet(connection, WORD)
        connection.settimeout(PATIENCE_SECONDS)
        connection.sendall(struct.pack("<qqqq", 0, 0, 0, count) + struct.pack(f"<{len(sizes)}q", *sizes))
        assert is_closed(connection)
    check_serves(listener, box, 1)


def test_what_is_too_much_for_a_socket_goes_through_ray(listener):
    other_way = []
    post = make_post(("127.0.0.1", listener.port), WORD, lambda step, *more: other_way.append(step))
    post(0, 7, 1, [np.zeros(LARGE_BYTES + 1, np.uint8)])
    post(1, 7, 1, [np.zeros(0, np.uint8)] * (MOST_TILES + 1))
    assert other_way == [0, 1]


def test_both_must_know_the_word(listener, box):
    """Of the word itself nothing goes over the socket, whoever asks."""
    for word in (b"wort" * 8, b""):
        assert _connected(("127.0.0.1", listener.port), word) is None
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend():
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"n" * 32)
                heard.append(connection.recv(2**10))
                connection.sendall(heard[0][32:])

        thread = threading.Thread(target=pretend)
        thread.start()
        assert _connected(server.getsockname(), WORD) is None
        thread.join()
    assert len(heard[0]) == 64 and b"word" not in heard[0]
    check_serves(listener, box, 1)


def test_one_who_listens_and_says_nothing(monkeypatch):
    monkeypatch.setattr(sockets, "GREET_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        other_way = []
        post = make_post(server.getsockname(), WORD, lambda step, *more: other_way.append(step))
        post(0, 7, 1, TILES)
    assert other_way == [0]


def where_it_listens(worker):
    """In a worker: for each of its ports at what addresses, as the kernel spells them; where its processes meet; its own."""
    import glob
    import os

    from jax._src import distributed

    own = {os.readlink(path) for path in glob.glob("/proc/self/fd/*") if os.path.exists(path)}
    found = {}
    for kind in ("tcp", "tcp6"):
        for words in (line.split() for line in open(f"/proc/self/net/{kind}").readlines()[1:]):
            if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                address, port = words[1].split(":")
                found.setdefault(int(port, 16), []).append(address)
    return found, distributed.global_state.coordinator_address, worker._listener.port


@pytest.mark.ray
def test_where_workers_listen(ray_started):
    """Where the processes of a stage meet, and where parcels come in: at the node's address and at no other."""
    import ray

    cluster = make_cluster(2, 1)
    step = autopar.parallelize(train_step, cluster=cluster, method=autopar.DataParallel())
    step(make_params(2, 8), make_batch(4, 8))
    actors = step.latest().executable.workers._actors.values()
    first, second = ray.get([actor.__ray_call__.remote(where_it_listens) for actor in actors])
    cluster.machine.close()
    host, port = first[1].rsplit(":", 1)
    bare = socket.inet_aton(host)[::-1].hex().upper()
    assert first[0][int(port)] in ([bare], ["0" * 16 + "FFFF0000" + bare]), "as IPv4, or in IPv6's spelling of it"
    for ports, _, own in (first, second):
        assert ports[own] == [bare]
