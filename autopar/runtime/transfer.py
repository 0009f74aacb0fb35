"""Transfers arrays from one submesh to another, in this process.

In:     an array's types and the devices of both meshes; `TransferPlan` (`streams/transfers.py`).
Out:    `Transfer`: called with an array on the source, returns it on the target.
Method: if each source device holds what its counterpart wants, one `jax.device_put` moves the array. Otherwise tiles are cut
        on the devices that hold them, copied to the devices that want them and assembled there; a general `jax.device_put`
        to another mesh would go through the host. Copies inside the target are made by an all-gather. Nothing waits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar._jax import takes_packed
from autopar.grouping import grouped
from autopar.mesh import ArrayType, Box, boxes
from autopar.streams.transfers import Tile, TransferPlan, plan_transfer

Transfer = Callable[[jax.Array], jax.Array]


def make_transfer(
    source: ArrayType, source_places: jax.sharding.Mesh, target: ArrayType, target_places: jax.sharding.Mesh
) -> Transfer:
    """The function that moves an array from one mesh to the other."""
    have, want = source.on(source_places), target.on(target_places)
    if have == want:
        return lambda array: jnp.array(array, copy=True)
    plan = plan_transfer(source.shape, source.sharding, source.mesh, target.sharding, target.mesh)
    shared = set(source_places.devices.flat) & set(target_places.devices.flat)
    held = source.boxes()
    if held == target.boxes() or shared or source.on_host or not math.prod(source.shape):
        # If both stages are on the same devices, the sender's program may donate the array, so it is copied. Tiles of an
        # array in host memory need not be cut on a device.
        return lambda array: jax.device_put(array, want, may_alias=False)
    if held == boxes(source.shape, plan.middle, target.mesh):
        middle = ArrayType(source.shape, source.dtype, plan.middle, target.mesh).on(target_places)
        gather = _gather(source, middle, want)
        return lambda array: gather(jax.device_put(array, middle, may_alias=False))
    return _by_tiles(plan, source, source_places, target, target_places)


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
    held = source.boxes()
    arriving = boxes(shape, plan.middle, target.mesh)
    cuts = [cut_tile(held[tile.source], tile.box) for tile in plan.tiles]
    joins = joins_by_device(plan.tiles, arriving, dtype)
    middle, want = ArrayType(shape, dtype, plan.middle, target.mesh).on(target_places), target.on(target_places)
    finish = None if middle.spec == want.spec else _gather(source, middle, want)
    targets = [receivers[tile.target] for tile in plan.tiles]
    put = put_together(shape, middle, joins, plan.forwards, dict(enumerate(receivers)), finish)

    def transfer(array: jax.Array) -> jax.Array:
        data = {shard.device: shard.data for shard in array.addressable_shards}
        parts = [cut(data[senders[tile.source]]) for tile, cut in zip(plan.tiles, cuts, strict=True)]
        return put(jax.device_put(parts, targets))

    return transfer


Joins = dict[int, tuple[list[int], Callable[[Sequence[jax.Array]], jax.Array]]]
"""For each device that receives tiles: which ones, and the function that assembles them."""


def put_together(
    shape: tuple[int, ...],
    middle: jax.sharding.NamedSharding,
    joins: Joins,
    forwards: Sequence[tuple[int, int]],
    devices: Mapping[int, jax.Device],
    finish: Transfer | None,
) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """The function that makes an array from the tiles on these devices: assembles, forwards, and copies inside the target."""

    def put(tiles: Sequence[jax.Array]) -> jax.Array:
        there = {device: join([tiles[k] for k in own]) for device, (own, join) in joins.items()}
        for first, second in forwards:
            there[second] = jax.device_put(there[first], devices[second])
        whole = jax.make_array_from_single_device_arrays(shape, middle, [there[device] for device in devices])
        return whole if finish is None else finish(whole)

    return put


def cut_tile(held: Box, box: Box) -> Callable[[jax.Array], jax.Array]:
    """The function that cuts a tile from what a device holds."""
    if held == box:
        return lambda array: array
    start = tuple(b[0] - h[0] for b, h in zip(box, held, strict=True))
    stop = tuple(b[1] - h[0] for b, h in zip(box, held, strict=True))
    return functools.partial(_slice, start, stop)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _slice(start: tuple[int, ...], stop: tuple[int, ...], array: jax.Array) -> jax.Array:
    return lax.slice(array, start, stop)


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
