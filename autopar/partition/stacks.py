"""Makes the zeros in which a scan stacks its results no earlier than the scan begins.

In:     what `jax.lax.scan` takes.
Out:    what it returns.
Method: `lax.scan` writes its rows into stacks that begin as zeros. These wait for nothing, and XLA:CPU makes them when the
        program begins: the stacks of the backward loop are then there all through the forward loop. Here the zeros wait
        for what the loop carries. XLA's schedulers for GPUs make zeros late by themselves, and know the stacks of a plain
        scan when they move collectives into other trips: there it stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar.partition.order import never

_Arrays = Sequence[jax.Array]


def scan_into_late_stacks(
    step: Callable[[_Arrays, _Arrays], tuple[_Arrays, _Arrays]],
    carries: tuple[jax.Array, ...],
    xs: tuple[jax.Array, ...],
    types: Sequence[jax.ShapeDtypeStruct | None],
    *,
    length: int,
    reverse: bool,
    unroll: Any,
) -> tuple[_Arrays, _Arrays]:
    """`lax.scan(step, carries, xs, ...)`, which returns stacks of these `types`; None: one that the device does not hold."""
    first = max(carries, key=lambda array: array.size, default=None)
    if first is None or first.size == 0 or not any(types) or not length:
        return lax.scan(step, carries, xs, length=length, reverse=reverse, unroll=unroll)
    late = never(first)
    begun = {
        k: jnp.broadcast_to(jnp.where(late, jnp.ones((), kind.dtype), jnp.zeros((), kind.dtype)), kind.shape)
        for k, kind in enumerate(types)
        if kind is not None
    }

    def write(carried: Any, rows: _Arrays) -> tuple[Any, _Arrays]:
        trip, held, stacks = carried
        held, made = step(held, rows)
        at = length - 1 - trip if reverse else trip
        written = {k: lax.dynamic_update_index_in_dim(stack, made[k], at, 0) for k, stack in stacks.items()}
        return (trip + 1, tuple(held), written), [row for k, row in enumerate(made) if k not in stacks]

    start = jnp.zeros((), jnp.int32), carries, begun
    (_, last, stacks), others = lax.scan(write, start, xs, length=length, reverse=reverse, unroll=unroll)
    left = iter(others)
    return last, [stacks[k] if k in stacks else next(left) for k in range(len(types))]
