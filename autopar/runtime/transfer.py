"""Transfers arrays from one submesh to another, in this process.

In:     an array's types and the devices of both meshes; `TransferPlan` (`streams/transfers.py`).
Out:    `Transfer`: starts to send an array on the source, and makes the one on the target.
Method: if each source device holds what its counterpart wants, one copy moves the array. Otherwise one program per device
        cuts the tiles that it holds, and one per device that wants them assembles them; a general `jax.device_put` to another
        mesh would go through the host. Copies inside the target are made by an all-gather. Nothing waits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar._jax import copied_to, takes_packed
from autopar.grouping import grouped
from autopar.mesh import ArrayType, Box, boxes
from autopar.streams.transfers import Tile, TransferPlan, crossing, plan_transfer


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """Moves an array from one mesh to another.

    Attributes:
        start: Starts to send it; returns what is on its way.
        finish: Makes the array on the target of that.
    """

    start: Callable[[jax.Array], list[jax.Array]]
    finish: Callable[[Sequence[jax.Array]], jax.Array]

    def __call__(self, array: jax.Array) -> jax.Array:
        """Do both."""
        return self.finish(self.start(array))


def make_transfer(
    source: ArrayType, source_places: jax.sharding.Mesh, target: ArrayType, target_places: jax.sharding.Mesh
) -> Transfer:
    """How an array moves from one mesh to the other."""
    have, want = source.on(source_places), target.on(target_places)
    shared = set(source_places.devices.flat) & set(target_places.devices.flat)
    if have == want:
        return Transfer(lambda array: [jnp.array(array, copy=True)], lambda arrived: arrived[0])
    if shared or source.on_host or not math.prod(source.shape):
        # If both stages are on the same devices, the sender's program may donate the array, so it is copied. Tiles of an
        # array in host memory need not be cut on a device.
        return Transfer(lambda array: [jax.device_put(array, want, may_alias=False)], lambda arrived: arrived[0])
    way = crossing(source, target)
    if way.is_cut:
        return _by_tiles(plan_transfer(source, target), source, source_places, target, target_places)
    middle = ArrayType(source.shape, source.dtype, way.middle, target.mesh).on(target_places)
    gather = (lambda array: array) if middle.spec == want.spec else _gather(source, middle, want)
    return Transfer(lambda array: copied_to([array], [middle]), lambda arrived: gather(*arrived))


def _by_tiles(
    plan: TransferPlan,
    source: ArrayType,
    source_places: jax.sharding.Mesh,
    target: ArrayType,
    target_places: jax.sharding.Mesh,
) -> Transfer:
    shape, dtype = source.shape, source.dtype
    senders = list(source_places.devices.flat)
    receivers = list(target_places.devices.flat)
    held, arriving = source.boxes(), boxes(shape, plan.middle, target.mesh)
    tiles = sorted(plan.tiles, key=lambda tile: tile.source)
    cuts = cuts_by_device(tiles, held)
    joins = joins_by_device(tiles, arriving, dtype)
    middle, want = ArrayType(shape, dtype, plan.middle, target.mesh).on(target_places), target.on(target_places)
    finish = None if middle.spec == want.spec else _gather(source, middle, want)
    targets = [jax.sharding.SingleDeviceSharding(receivers[tile.target]) for tile in tiles]

    def start(array: jax.Array) -> list[jax.Array]:
        data = shards_by_device(array)
        return copied_to([part for k, (_, cut) in cuts.items() for part in cut(data[senders[k]])], targets)

    return Transfer(start, put_together(shape, middle, joins, plan.forwards, dict(enumerate(receivers)), finish))


def shards_by_device(array: jax.Array) -> dict[jax.Device, jax.Array]:
    """What each device of this process holds of an array."""
    return {shard.device: shard.data for shard in array.addressable_shards}


Joins = dict[int, tuple[list[int], Callable[[Sequence[jax.Array]], jax.Array]]]
"""For each device that receives tiles: which ones, and the function that assembles them."""


def put_together(
    shape: tuple[int, ...],
    middle: jax.sharding.NamedSharding,
    joins: Joins,
    forwards: Sequence[tuple[int, int]],
    devices: Mapping[int, jax.Device],
    finish: Callable[[jax.Array], jax.Array] | None,
) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """The function that makes an array from the tiles on these devices: assembles, forwards, and copies inside the target."""

    def put(tiles: Sequence[jax.Array]) -> jax.Array:
        there = {device: join([tiles[k] for k in own]) for device, (own, join) in joins.items()}
        for first, second in forwards:
            there[second] = jax.device_put(there[first], devices[second])
        whole = jax.make_array_from_single_device_arrays(shape, middle, [there[device] for device in devices])
        return whole if finish is None else finish(whole)

    return put


Cuts = dict[int, tuple[list[int], Callable[[jax.Array], Sequence[jax.Array]]]]
"""For each device that sends tiles: which ones, and the function that cuts them from what it holds."""


def cuts_by_device(tiles: Sequence[Tile], held: Sequence[Box]) -> Cuts:
    """How each device cuts the tiles that it sends, all of them by one program."""
    return {
        device: (own, _cut_tiles(held[device], [tiles[k].box for k in own]))
        for device, own in grouped((tile.source, k) for k, tile in enumerate(tiles)).items()
    }


def _cut_tiles(held: Box, tiles: Sequence[Box]) -> Callable[[jax.Array], Sequence[jax.Array]]:
    if all(tile == held for tile in tiles):
        return lambda array: [array] * len(tiles)
    limits = tuple(
        tuple(tuple(b[end] - h[0] for b, h in zip(tile, held, strict=True)) for end in (0, 1)) for tile in tiles
    )
    return functools.partial(_slices, limits)


@functools.partial(jax.jit, static_argnums=0)
def _slices(limits: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], array: jax.Array) -> list[jax.Array]:
    return [lax.slice(array, start, stop) for start, stop in limits]


def joins_by_device(tiles: Sequence[Tile], arriving: Sequence[Box], dtype: Any) -> Joins:
    """How each device assembles the tiles that arrive there."""
    return {
        device: (own, _join_tiles(arriving[device], [tiles[k].box for k in own], dtype))
        for device, own in grouped((tile.target, k) for k, tile in enumerate(tiles)).items()
    }


def _join_tiles(box: Box, tiles: Sequence[Box], dtype: Any) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """The function that assembles a device's box from its tiles."""
    if len(tiles) == 1 and tiles[0] == box:
        return lambda parts: parts[0]
    shape = tuple(stop - start for start, stop in box)
    starts = tuple(tuple(t[0] - b[0] for t, b in zip(tile, box, strict=True)) for tile in tiles)
    return lambda parts: _assemble(shape, dtype, starts, *parts)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _assemble(shape: tuple[int, ...], dtype: Any, starts: Sequence[tuple[int, ...]], *parts: jax.Array) -> jax.Array:
    # XLA:CPU of JAX 0.11 crashes the process when it writes elements smaller than a byte into a slice.
    roomy = dtype
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        roomy = jnp.int8
    elif jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8:
        roomy = jnp.float32
    whole = jnp.zeros(shape, roomy)
    for start, part in zip(starts, parts, strict=True):
        whole = lax.dynamic_update_slice(whole, part.astype(roomy), start)
    return whole.astype(dtype)


def _gather(kind: ArrayType, middle: jax.sharding.NamedSharding, want: jax.sharding.NamedSharding) -> Any:
    """The compiled program that gathers an array inside the target mesh."""
    struct = jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=middle)
    identity = jax.jit(lambda x: x, in_shardings=middle, out_shardings=want)
    return takes_packed(identity.lower(struct).compile())
