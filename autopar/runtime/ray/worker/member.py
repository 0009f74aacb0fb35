"""A worker's connections to the other workers.

In:     its seat; the addresses of the others, and the job's secret.
Out:    for each message of a job, the function that sends or receives it: from GPU to GPU, or through Ray.
Method: the workers of one mesh form one `jax.distributed` group. Each worker listens at one address only, and accepts only
        connections of workers that know the secret.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from autopar.errors import ClusterError, DeviceCountError
from autopar.runtime.acts import Receive, SendTo
from autopar.runtime.ray.seats import Seat
from autopar.runtime.ray.share import Position, Tiles
from autopar.runtime.ray.transport.direct import Direct, Pair
from autopar.runtime.ray.transport.nccl import NcclChannel, NcclId, can_use_nccl, new_id
from autopar.runtime.ray.transport.parcels import Message
from autopar.runtime.ray.transport.sockets import Listener, Post, make_post
from autopar.runtime.ray.transport.transport import Mailbox, ObjectStore, Transport
from autopar.runtime.ray.worker.places import Places
from autopar.streams.instructions import MeshId


class Member:
    """The part of a worker that meets the others and exchanges messages with them."""

    def __init__(self, seat: Seat, wait_seconds: float):
        self.seat, self._wait_seconds = seat, wait_seconds
        self.places = Places(seat)
        self.position, self._since = Position(0, None), time.monotonic()
        self._mailbox = Mailbox()
        self._listener: Listener
        self._store: ObjectStore
        self._direct: Direct | None = None
        self._channels: dict[Pair, NcclChannel] = {}

    def where(self) -> Position:
        """Its position in the stream; an answer also shows that the worker is alive."""
        return dataclasses.replace(self.position, seconds=time.monotonic() - self._since)

    def _stand(self, at: int, awaited: int | None = None) -> None:
        self.position, self._since = Position(at, awaited), time.monotonic()

    def deliver(self, step: int, message: int, source: int, tiles: Tiles) -> None:
        """Take a parcel from another worker."""
        self._mailbox.put((step, message, source), tiles)

    def coordinator(self, host: str) -> str:
        """An address, on this host, for the coordinator of the workers of its mesh.

        Raises:
            ClusterError: This host has no such address. Listening at every address instead would admit anyone, since JAX's
                coordinator asks for no secret.
        """
        try:
            with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                port = probe.getsockname()[1]
        except OSError as error:
            raise ClusterError(
                "the workers of a stage over several hosts cannot meet.",
                given=f"{self.seat}, on the node that Ray knows by {host}",
                wrong=f"that is no address of an interface of this node ({error}).",
                do="start Ray there with `ray start --node-ip-address=` and the address of an interface which the other "
                "nodes reach.",
            ) from error
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def join(self, coordinator: str, count: int) -> None:
        """Join the `jax.distributed` group of the workers of its mesh."""
        # All is passed explicitly: under Slurm and the like, JAX would read their variables, which describe another job.
        jax.distributed.initialize(
            coordinator,
            count,
            self.seat.rank,
            local_device_ids=range(self.seat.count),
            cluster_detection_method="deactivate",
            coordinator_bind_address=coordinator,  # JAX's default is every interface, and it asks for no secret
        )

    def can_go_direct(self) -> bool:
        """Whether it can send from GPU to GPU."""
        return jax.default_backend() == "gpu" and can_use_nccl()

    def listen(self, host: str, word: bytes) -> int:
        """Listen for parcels of workers that know the secret `word`, at this address of its host. Returns the port."""
        self._listener = Listener(host, word, self.deliver)
        return self._listener.port

    def connect(
        self,
        peers: Mapping[int, Any],
        addresses: Mapping[int, tuple[str, int]],
        word: bytes,
        owner: Mapping[MeshId, Mapping[int, int]],
        direct: bool,
    ) -> None:
        """Learn about the other workers: their actors, their addresses, the secret, and by mesh the worker of each device.

        Raises `DeviceCountError`: JAX found another number of devices than this worker should have.
        """
        if jax.local_device_count() != self.seat.count:
            raise DeviceCountError(
                "a worker has other devices than were given to it.",
                given=f"{self.seat}, {self.seat.count} devices; environment {_variables()}",
                wrong=f"its JAX has {jax.local_devices()}.",
                do="install JAX for these devices on every node, and set none of these variables there.",
                wanted=self.seat.count,
                available=jax.local_device_count(),
            )
        posts = {number: make_post(addresses[number], word, _through_ray(peer)) for number, peer in peers.items()}
        self._store = ObjectStore(self.seat, self.places, self._mailbox, posts, self._wait_seconds)
        if direct:
            self._direct = Direct(self.seat, self.places, self._channels, owner, self._wait_seconds)

    def new_channel(self) -> NcclId:
        """A new id for a channel in which this worker has the first rank."""
        return new_id()

    def open(self, pair: Pair, unique_id: NcclId, num_sources: int, num_targets: int) -> None:
        """Open a channel from one mesh to another, together with all workers of both."""
        first = self.seat.first + (0 if self.seat.mesh == pair[0] else num_sources)
        own = {first + k: device for k, device in enumerate(jax.local_devices())}
        self._channels[pair] = NcclChannel(unique_id, num_sources, num_sources + num_targets, own)

    def _ways(self, messages: Iterable[Message]) -> tuple[dict[int, SendTo], dict[int, Receive]]:
        """The functions that send or receive each message: from GPU to GPU, or through Ray, always so within a mesh."""
        sends: dict[int, SendTo] = {}
        receives: dict[int, Receive] = {}
        for transport in self._transports():
            own = [m for m in messages if self._transport_of(m) is transport]
            for message in own:
                if message.source == self.seat.mesh:
                    sends[message.number] = transport.sender(message)
                    self._stand(0)
            coming = [m for m in own if m.target == self.seat.mesh]
            for source in dict.fromkeys(m.source for m in coming):
                receives.update(transport.receivers([m for m in coming if m.source == source]))
                self._stand(0)
        return sends, receives

    def _transports(self) -> list[Transport]:
        return [self._store] if self._direct is None else [self._store, self._direct]

    def _transport_of(self, message: Message) -> Transport:
        return self._store if self._direct is None or message.source == message.target else self._direct


def _through_ray(peer: Any) -> Post:
    deliver = peer.deliver.options(concurrency_group="mail", num_returns=0)

    def post(step: int, message: int, source: int, tiles: Tiles) -> None:
        deliver.remote(step, message, source, tiles)

    return post


def _variables() -> dict[str, str]:
    names = ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS", "XLA_FLAGS")
    return {name: os.environ[name] for name in names if name in os.environ}
