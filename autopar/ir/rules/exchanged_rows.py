"""Sends rows to the devices of their groups and back: all-to-alls whose counts are known only at run time.

In:     a device's rows, in parts that are each sorted by group, and the number of rows of each group in each part.
Out:    `Exchange`: the rows of a device's own groups, group by group; and results for them, returned to where the rows came
        from.
Method: one `ragged_all_to_all` each way, with a message per part and group. A device may receive all rows, so the array they
        arrive in is that long, with zeros behind them. Where the backend has no such collective (XLA for CPUs), rows are
        gathered from all devices and picked, in a call of its name: a traced program shows what it stands for.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

PLATFORMS = ("gpu", "cuda", "rocm", "tpu")
"""Platforms with an all-to-all of unequal counts."""


@dataclass(frozen=True, slots=True)
class _Messages:
    """The messages of one device in rows, int32 `[other device, group, part]` or its like.

    Attributes:
        begins: Start of each message in the sender's array.
        counts: Length of each message.
        ends_at: Start of each message in the receiver's array.
        received: Lengths of the messages that this device receives.
    """

    begins: jax.Array
    counts: jax.Array
    ends_at: jax.Array
    received: jax.Array


class Exchange:
    """An exchange of rows between devices, each with parts of equal length and groups of its own. Only inside `shard_map`.

    `sizes`: how many rows of each of its groups a device receives.
    """

    def __init__(self, counts: jax.Array, length: int, axes: tuple[str, ...], platform: str):
        """Compute the messages.

        Args:
            counts: Rows of each group in each part of each device, int32 `[device, part, group]`; the same on all devices.
            length: Rows of a part.
            axes: Mesh axes of the devices.
            platform: The devices' platform.
        """
        devices, parts, groups = counts.shape
        own = groups // devices
        self.axes, self.platform, self.num_rows = axes, platform, parts * length
        self.capacity = devices * parts * length
        here = lax.axis_index(axes)
        # By sender, part, receiver and the receiver's group: where rows are now, and where they arrive.
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
        """Send this device's rows `[part times length, ...]`; returns those of its groups `[capacity, ...]`, then zeros."""
        return self._carry(rows, self.capacity, self._out)

    def bring_back(self, made: jax.Array) -> jax.Array:
        """Send results for the received rows back to where the rows came from; rows of no group are zeros."""
        return self._carry(made, self.num_rows, self._back)

    def _carry(self, rows: jax.Array, length: int, messages: _Messages) -> jax.Array:
        arrays = [messages.begins, messages.counts, messages.ends_at, messages.received]
        begins, counts, ends_at, received = (array.reshape(-1) for array in arrays)
        if self.platform in PLATFORMS:
            made = jnp.zeros((length, *rows.shape[1:]), rows.dtype)
            return lax.ragged_all_to_all(rows, made, begins, counts, ends_at, received, axis_name=self.axes)
        return ragged_all_to_all(rows, (begins, counts, ends_at), received, length=length, axes=self.axes)


@functools.partial(jax.jit, static_argnames=("length", "axes"))
def ragged_all_to_all(
    rows: jax.Array, sent: tuple[jax.Array, ...], received: jax.Array, *, length: int, axes: tuple[str, ...]
) -> jax.Array:
    """As that of `lax`, where there is none: look up each row of the result among the rows of all devices.

    Args:
        rows: A device's rows `[row, ...]`.
        sent: Starts of the messages here, their lengths, and their starts at the receiver, int32 `[receiver and message]`.
        received: Lengths of the messages that this device receives, int32 `[sender and message]`.
        length: Rows of the result.
        axes: Mesh axes of the devices.

    Returns:
        The rows received, and zeros in between `[length, ...]`.
    """
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
