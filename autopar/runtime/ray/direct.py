"""Messages from device to device.

In:     values on the devices of the sender; a `Channel` for each pair of meshes.
Out:    the same values on the devices of the receiver.
Method: the tiles of `plan/transfers.py`: cut on the device that holds them, all tiles of a message sent as one group, put
        together where they arrive, copied inside the target by an all-gather. A channel carries messages in the order in
        which they are sent: one that is wanted earlier than it was sent is received with all before it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from autopar.plan.instructions import MeshId
from autopar.plan.transfers import Tile, TransferPlan, boxes, plan_transfer
from autopar.runtime.ray.job import BufferType
from autopar.runtime.ray.parcels import Message, box_shape
from autopar.runtime.ray.seats import Seat
from autopar.runtime.ray.transport import Places, Receive, Send, WaitError
from autopar.runtime.transfer import cut_tile, join_tiles

Pair = tuple[MeshId, MeshId]
"""A mesh that sends and one that receives."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tile that is to come: from which device of the sending mesh, to which of the receiving."""

    shape: tuple[int, ...]
    dtype: np.dtype
    source: int
    target: int


class Channel(Protocol):
    """From one mesh to another, as one worker has it. Devices are named as their mesh counts them."""

    def send(self, tiles: Sequence[tuple[jax.Array, int, int]]) -> None:
        """Begin to send (tile, own device, the other's device), as one group."""
        ...

    def receive(self, wanted: Sequence[Wanted]) -> list[jax.Array]:
        """Begin to receive, as one group; programs that use what comes wait for it."""
        ...

    def wait(self, seconds: float) -> bool:
        """Wait until all that was begun is done; False: it was not in time."""
        ...


class Direct:
    """A transport through channels.

    Attributes:
        sent_bytes: How much was handed to other workers.
        copied_bytes: How much of it was copied in the host's memory: nothing.
    """

    def __init__(
        self,
        seat: Seat,
        places: Places,
        channels: Mapping[Pair, Channel],
        owner: Mapping[MeshId, Mapping[int, int]],
        wait_seconds: float,
    ):
        """Of one worker.

        Args:
            seat: Whose.
            places: Its devices.
            channels: Of the pairs that it sends or receives for; may grow.
            owner: For each mesh, the worker of each device.
            wait_seconds: How long messages may take.
        """
        self._seat, self._places, self._channels, self._owner = seat, places, channels, owner
        self._wait_seconds = wait_seconds
        self.sent_bytes = self.copied_bytes = 0

    def sender(self, message: Message) -> Send:
        """As of `Transport`."""
        channel = self._channels[message.source, message.target]
        moves = []
        for have, want, over in zip(message.sent, message.received, message.overwritten, strict=True):
            held = have.boxes()
            own = [t for t in self._tiles(_planned(have, want), message) if t.source in self._seat.devices]
            moves.append(
                [
                    (t, _own if over and t.box == held[t.source] else cut_tile(held[t.source], t.box, have.shape))
                    for t in own
                ]
            )
        devices = [self._places.devices(kind) for kind in message.sent]

        def send(step: int, arrays: Sequence[jax.Array]) -> None:
            tiles = []
            for array, own, cuts in zip(arrays, devices, moves, strict=True):
                data = {shard.device: shard.data for shard in array.addressable_shards}
                for tile, cut in cuts:
                    tiles.append((cut(data[own[tile.source - self._seat.first]]), tile.source, tile.target))
            self.sent_bytes += sum(tile.nbytes for tile, _, _ in tiles)
            channel.send(tiles)

        return send

    def receivers(self, messages: Sequence[Message]) -> dict[int, Receive]:
        """As of `Transport`."""
        found: dict[int, Receive] = {}
        for pair in dict.fromkeys((m.source, m.target) for m in messages):
            own = sorted((m for m in messages if (m.source, m.target) == pair), key=lambda m: m.turn)
            found.update(self._lane(own))
        return found

    def flush(self, on_progress: Callable[[], None]) -> None:
        """As of `Transport`; waits for what is received, too."""
        for (source, target), channel in self._channels.items():
            if not channel.wait(self._wait_seconds):
                other = target if source == self._seat.mesh else source
                raise WaitError(min(self._owner[other].values()), self._wait_seconds)
            on_progress()

    def _lane(self, messages: Sequence[Message]) -> dict[int, Receive]:
        """The messages of one pair, in the order in which they come."""
        begin = [self._receiver(message) for message in messages]
        begun: dict[int, list[jax.Array]] = {}
        state = {"step": -1, "next": 0}

        def receive(turn: int, step: int) -> list[jax.Array]:
            if state["step"] != step:
                state.update(step=step, next=0)
            while state["next"] <= turn:
                begun[state["next"]] = begin[state["next"]]()
                state["next"] += 1
            return begun.pop(turn)

        return {m.number: functools.partial(receive, turn) for turn, m in enumerate(messages)}

    def _receiver(self, message: Message) -> Callable[[], list[jax.Array]]:
        channel = self._channels[message.source, message.target]
        wanted: list[Wanted] = []
        finish = []
        for have, want, taken in zip(message.sent, message.received, message.taken, strict=True):
            plan = _planned(have, want)
            tiles = [t for t in self._tiles(plan, message) if t.target in self._seat.devices]
            wanted += [Wanted(box_shape(t.box), have.dtype, t.source, t.target) for t in tiles]
            finish.append((len(tiles), self._assembly(plan, tiles, want, taken)))

        def begin() -> list[jax.Array]:
            tiles = iter(channel.receive(wanted))
            return [put([next(tiles) for _ in range(count)]) for count, put in finish]

        return begin

    def _tiles(self, plan: TransferPlan, message: Message) -> list[Tile]:
        """What crosses; a copy that is handed on to a device of another process crosses too."""
        owner = self._owner[message.target]
        more = [
            Tile(tile.source, second, tile.box)
            for first, second in plan.forwards
            if owner[first] != owner[second]
            for tile in plan.tiles
            if tile.target == first
        ]
        return [*plan.tiles, *more]

    def _assembly(
        self, plan: TransferPlan, tiles: Sequence[Tile], want: BufferType, taken: bool
    ) -> Callable[[Sequence[jax.Array]], jax.Array]:
        """How an array is made of the tiles that came to this worker's devices."""
        arriving = boxes(want.shape, plan.middle, want.mesh)
        devices = dict(zip(self._seat.devices, self._places.devices(want), strict=True))
        of_device: dict[int, list[int]] = {}
        for k, tile in enumerate(tiles):
            of_device.setdefault(tile.target, []).append(k)
        joins = {
            device: join_tiles(arriving[device], [tiles[k].box for k in own], want.dtype)
            for device, own in of_device.items()
        }
        handed_on = [(a, b) for a, b in plan.forwards if a in devices and b in devices and b not in of_device]
        wanted = self._places.sharding(want)
        middle = jax.sharding.NamedSharding(wanted.mesh, plan.middle.partition_spec())
        gather = None if middle.spec == wanted.spec else jax.jit(lambda x: x, out_shardings=wanted)

        def put(parts: Sequence[jax.Array]) -> jax.Array:
            there = {device: joins[device]([parts[k] for k in own]) for device, own in of_device.items()}
            for first, second in handed_on:
                there[second] = jax.device_put(there[first], devices[second])
            shards = [there[device] for device in self._seat.devices]
            array = jax.make_array_from_single_device_arrays(want.shape, middle, shards)
            array = array if gather is None else gather(array)
            return _own(array) if taken else array

        return put


def _planned(have: BufferType, want: BufferType) -> TransferPlan:
    return plan_transfer(have.shape, have.sharding, have.mesh, want.sharding, want.mesh)


def _own(array: jax.Array) -> jax.Array:
    """A copy, in memory that no one else looks at: programs that take memory over may have it."""
    return jnp.array(array, copy=True)
