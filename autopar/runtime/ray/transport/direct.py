"""Sends messages from device to device, without the host.

In:     values on the devices of the sender; an `NcclChannel` for each pair of meshes.
Out:    the same values on the devices of the receiver.
Method: the tiles of `streams/transfers.py` are cut on the devices that hold them, sent as one group per message, assembled
        where they arrive, and copied inside the target by an all-gather. A channel carries messages in the order of sending:
        a message that is wanted out of order is received together with all before it. When a job is loaded, all of this
        except the sending is done once, with zeros: what a program needs at its first run (compilation, memory,
        communicators) must not be waited for while messages are in flight.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.mesh import ArrayType, boxes
from autopar.runtime.acts import Receive, SendTo
from autopar.runtime.ray.seats import Seat
from autopar.runtime.ray.transport.nccl import NcclChannel, Wanted
from autopar.runtime.ray.transport.parcels import Message, box_shape
from autopar.runtime.ray.transport.plain import as_plain, from_plain, is_narrow
from autopar.runtime.ray.transport.transport import WaitError
from autopar.runtime.ray.worker.places import Places
from autopar.runtime.transfer import cuts_by_device, joins_by_device, put_together, shards_by_device
from autopar.streams.instructions import MeshId
from autopar.streams.transfers import Tile, TransferPlan, plan_transfer

Pair = tuple[MeshId, MeshId]
"""The sending mesh and the receiving mesh."""
AHEAD = 4
"""The most messages of a channel in flight to a worker while it continues: each takes memory."""


class Direct:
    """A transport through channels, without copies in host memory; attributes as in `Transport`."""

    def __init__(
        self,
        seat: Seat,
        places: Places,
        channels: Mapping[Pair, NcclChannel],
        owner: Mapping[MeshId, Mapping[int, int]],
        wait_seconds: float,
    ):
        """Of one worker. `channels`: may get more entries later. `owner`: the worker of each device, by mesh."""
        self._seat, self._places, self._channels, self._owner = seat, places, channels, owner
        self._wait_seconds = wait_seconds
        self._rehearsed: set[Any] = set()
        self._gathers: dict[Any, Callable[[jax.Array], jax.Array]] = {}
        self.sent_bytes = self.copied_bytes = 0

    def sender(self, message: Message) -> SendTo:
        """As in `Transport`."""
        channel = self._channels[message.source, message.target]
        moves = []
        for have, want, over in zip(message.sent, message.received, message.overwritten, strict=True):
            held = have.boxes()
            tiles = [t for t in self._tiles(plan_transfer(have, want), message) if t.source in self._seat.devices]
            moves.append(
                [
                    (
                        [tiles[k] for k in own],
                        functools.partial(_of_copy, cut) if over and tiles[own[0]].box == held[source] else cut,
                    )
                    for source, (own, cut) in cuts_by_device(tiles, held).items()
                ]
            )
        devices = [self._places.devices(kind) for kind in message.sent]

        def cut_all(arrays: Sequence[jax.Array]) -> list[tuple[jax.Array, int, int]]:
            found = []
            for array, own, cuts in zip(arrays, devices, moves, strict=True):
                data = shards_by_device(array)
                for tiles, cut in cuts:
                    parts = cut(data[own[tiles[0].source - self._seat.first]])
                    found += [(part, tile.source, tile.target) for tile, part in zip(tiles, parts, strict=True)]
            return found

        def send(step: int, arrays: Sequence[jax.Array]) -> None:
            tiles = cut_all(arrays)
            self.sent_bytes += sum(tile.nbytes for tile, _, _ in tiles)
            channel.send(message.number, tiles)

        if self._is_new(message, message.overwritten):
            channel.rehearse([tile for tile, _, _ in cut_all([self._zeros(kind) for kind in message.sent])], ())
        return send

    def receivers(self, messages: Sequence[Message]) -> dict[int, Receive]:
        """As in `Transport`."""
        found: dict[int, Receive] = {}
        for pair in dict.fromkeys((m.source, m.target) for m in messages):
            own = sorted((m for m in messages if (m.source, m.target) == pair), key=lambda m: m.turn)
            found.update(self._lane(own))
        return found

    def flush(self, on_progress: Callable[[], None]) -> None:
        """As in `Transport`; waits for received messages too."""
        for pair in self._channels:
            self._wait(pair, on_progress)

    def _wait(self, pair: Pair, on_progress: Callable[[], None], behind: int = 0) -> None:
        late = self._channels[pair].wait(self._wait_seconds, on_progress, behind)
        if late is not None:
            owner = self._owner[pair[1] if late.is_sent else pair[0]]
            workers = sorted({owner[device] for device in late.others})
            raise WaitError(workers, self._wait_seconds, late.message, late.is_sent)

    def _is_new(self, message: Message, *more: Any) -> bool:
        """Whether no message of the same types has been prepared yet; microbatches are alike."""
        key = message.source, message.target, message.sent, message.received, more
        is_new = key not in self._rehearsed
        self._rehearsed.add(key)
        return is_new

    def _zeros(self, kind: ArrayType) -> jax.Array:
        """An array of zeros of this type; this worker has its part."""
        held, own = kind.boxes(), zip(self._seat.devices, self._places.devices(kind), strict=True)
        shards = [jax.device_put(np.zeros(box_shape(held[at]), kind.dtype), device) for at, device in own]
        return jax.make_array_from_single_device_arrays(kind.shape, self._places.sharding(kind), shards)

    def _lane(self, messages: Sequence[Message]) -> dict[int, Receive]:
        """The receive functions of the messages of one channel, given in the order of sending."""
        receivers = [self._receiver(message) for message in messages]
        begin, wanted = [begin for begin, _ in receivers], [wanted for _, wanted in receivers]
        channel = self._channels[messages[0].source, messages[0].target]
        for first in range(len(wanted)):
            channel.reserve(wanted[first : first + AHEAD + 1])
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

    def _receiver(self, message: Message) -> tuple[Callable[[], list[jax.Array]], list[Wanted]]:
        """The function that starts to receive a message, and the tiles that it receives."""
        pair = message.source, message.target
        channel = self._channels[pair]
        wanted: list[Wanted] = []
        finish = []
        for have, want in zip(message.sent, message.received, strict=True):
            plan = plan_transfer(have, want)
            tiles = [t for t in self._tiles(plan, message) if t.target in self._seat.devices]
            wanted += [Wanted(box_shape(t.box), have.dtype, t.source, t.target) for t in tiles]
            finish.append((len(tiles), self._assembly(plan, tiles, want)))

        def put_all(arrived: Sequence[jax.Array]) -> list[jax.Array]:
            tiles = iter(arrived)
            return [put([next(tiles) for _ in range(count)]) for count, put in finish]

        def begin() -> list[jax.Array]:
            found = put_all(channel.receive(message.number, wanted))
            self._wait(pair, lambda: None, AHEAD)
            return found

        if self._is_new(message):
            jax.block_until_ready(put_all(channel.rehearse((), wanted)))
        return begin, wanted

    def _tiles(self, plan: TransferPlan, message: Message) -> list[Tile]:
        """The tiles that cross between the meshes; a copy for a device of another process crosses as well."""
        owner = self._owner[message.target]
        more = [
            Tile(tile.source, second, tile.box)
            for first, second in plan.forwards
            if owner[first] != owner[second]
            for tile in plan.tiles
            if tile.target == first
        ]
        return [tile for tile in (*plan.tiles, *more) if tile.num_elements]

    def _assembly(
        self, plan: TransferPlan, tiles: Sequence[Tile], want: ArrayType
    ) -> Callable[[Sequence[jax.Array]], jax.Array]:
        """The function that assembles an array from the tiles on this worker's devices; from none, if it has no elements."""
        if not math.prod(want.shape):
            return lambda parts: self._zeros(want)
        arriving = boxes(want.shape, plan.middle, want.mesh)
        devices = dict(zip(self._seat.devices, self._places.devices(want), strict=True))
        joins = joins_by_device(tiles, arriving, want.dtype)
        handed_on = [(a, b) for a, b in plan.forwards if a in devices and b in devices and b not in joins]
        wanted = self._places.sharding(want)
        middle = jax.sharding.NamedSharding(wanted.mesh, plan.middle.partition_spec())
        gather = None if middle.spec == wanted.spec else self._gather(middle, wanted, want.dtype)

        return put_together(want.shape, middle, joins, handed_on, devices, gather)

    def _gather(
        self, middle: jax.sharding.NamedSharding, wanted: jax.sharding.NamedSharding, dtype: np.dtype
    ) -> Callable[[jax.Array], jax.Array]:
        """The function that gathers an array inside the target mesh."""
        key = middle, wanted, dtype
        if key not in self._gathers:
            gather = jax.jit(lambda x: x, in_shardings=middle, out_shardings=wanted)
            back = jax.jit(functools.partial(from_plain, dtype=dtype), out_shardings=wanted)
            # XLA's collectives do not support all dtypes below a byte: with two bits, its CPU client crashes.
            self._gathers[key] = (lambda x: back(gather(as_plain(x)))) if is_narrow(dtype) else gather
        return self._gathers[key]


def _of_copy(cut: Callable[[jax.Array], Sequence[jax.Array]], array: jax.Array) -> Sequence[jax.Array]:
    """The tiles in memory of their own, since a later program overwrites the original."""
    return cut(jnp.array(array, copy=True))
