"""Rows that travel to the devices of their groups, and back: all-to-alls of counts that are known when they run.

In:     a device's rows, in parts that are sorted by group each, and how many rows of each part are of each group.
Out:    `Exchange`: the rows of a device's own groups, one group after the other, and of what is made of them each row where
        it came from.
Method: one `ragged_all_to_all` each way, with a message for each part and each group. Of how many rows a device gets only
        the most is known, which is all of them: so long is the array that they arrive in, and the rest is zeros. Where the
        backend has no such collective (XLA for CPUs), the same is picked of what all devices have.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

PLATFORMS = ("gpu", "cuda", "rocm", "tpu")
"""Which have an all-to-all of unequal counts."""


@dataclass(frozen=True, slots=True)
class _Messages:
    """What a device sends to each other one and gets from it, in rows; int32 `[device, group of the receiver, part]` or alike.

    Attributes:
        begins: In its own array.
        counts: Of each message.
        ends_at: Where a message begins in the receiver's array.
        received: Counts of those that it gets.
    """

    begins: jax.Array
    counts: jax.Array
    ends_at: jax.Array
    received: jax.Array


class Exchange:
    """Between some devices, at which rows are in parts of equal length, and at which groups are. Valid inside `shard_map` only.

    Attributes:
        sizes: How many rows a device then has of each of its groups.
    """

    def __init__(self, counts: jax.Array, length: int, axes: tuple[str, ...], platform: str):
        """Who sends what.

        Args:
            counts: Rows of each group in each part of each device, int32 `[device, part, group]`; equal on all of them.
            length: Of a part.
            axes: Mesh axes of the devices.
            platform: Of the devices.
        """
        devices, parts, groups = counts.shape
        own = groups // devices
        self.axes, self.platform, self.num_rows = axes, platform, parts * length
        self.capacity = devices * parts * length
        here = lax.axis_index(axes)
        # By sender, part, receiver and the receiver's group: where rows are, and where they are then.
        of_each = counts.reshape(devices, parts, devices, own)
        before = (jnp.cumsum(counts, 2) - counts).reshape(of_each.shape)
        starts = before + length * jnp.arange(parts, dtype=counts.dtype)[None, :, None, None]
        in_order = of_each.transpose(2, 3, 0, 1)  # [receiver, group, sender, part]
        flat = in_order.reshape(devices, -1)
        places = (jnp.cumsum(flat, 1) - flat).reshape(in_order.shape)
        self.sizes = jnp.sum(in_order[here], (1, 2))
        sent, got = of_each[here].transpose(1, 2, 0), in_order[here].transpose(1, 0, 2)  # [other one, group, part]
        start_there, place_here = starts[:, :, here].transpose(0, 2, 1), places[here].transpose(1, 0, 2)
        self._out = _Messages(starts[here].transpose(1, 2, 0), sent, places[:, :, here], got)
        self._back = _Messages(place_here, got, start_there, sent)

    def send(self, rows: jax.Array) -> jax.Array:
        """The rows of a device's own groups `[capacity, ...]` of its own rows `[part times length, ...]`; behind them zeros."""
        return self._carry(rows, self.capacity, self._out)

    def bring_back(self, made: jax.Array) -> jax.Array:
        """Of what is made of those, each row where it came from; rows that are of no group are zeros."""
        return self._carry(made, self.num_rows, self._back)

    def _carry(self, rows: jax.Array, length: int, messages: _Messages) -> jax.Array:
        arrays = [messages.begins, messages.counts, messages.ends_at, messages.received]
        begins, counts, ends_at, received = (array.reshape(-1) for array in arrays)
        if self.platform in PLATFORMS:
            made = jnp.zeros((length, *rows.shape[1:]), rows.dtype)
            return lax.ragged_all_to_all(rows, made, begins, counts, ends_at, received, axis_name=self.axes)
        return _picked(rows, length, (begins, counts, ends_at), received, self.axes)


def _picked(
    rows: jax.Array, length: int, sent: tuple[jax.Array, ...], received: jax.Array, axes: tuple[str, ...]
) -> jax.Array:
    """What `ragged_all_to_all` brings, where there is none: every row of the result is looked up in those of all devices."""
    devices, here = lax.axis_size(axes), lax.axis_index(axes)
    messages = lax.all_gather(jnp.stack(sent), axes)  # [sender, 3, receiver times message]
    to_here = messages.reshape(devices, 3, devices, -1)[:, :, here]
    first, count, place = (to_here[:, k].reshape(-1) for k in range(3))
    count = jnp.minimum(count, received)  # they are equal
    sender = jnp.repeat(jnp.arange(devices), to_here.shape[-1])
    number = jnp.arange(length, dtype=place.dtype)[:, None]
    is_in = (number >= place) & (number < place + count)
    which = jnp.argmax(is_in, 1)
    at = sender[which] * len(rows) + first[which] + number[:, 0] - place[which]
    found = jnp.take(lax.all_gather(rows, axes, tiled=True), at, axis=0, mode="clip")
    is_there = jnp.any(is_in, 1).reshape(-1, *(1,) * (rows.ndim - 1))
    return jnp.where(is_there, found, jnp.zeros_like(found))
