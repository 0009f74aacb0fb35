"""Delays the allocation of a scan's stacks until the scan begins.

In:     the arguments of `jax.lax.scan`.
Out:    its results.
Method: `lax.scan` writes rows into stacks of zeros. These depend on nothing, so that XLA:CPU makes them when the program
        begins, and the stacks of the backward loop are alive throughout the forward loop. Here the zeros depend on a
        carry. For GPUs a plain scan is used: XLA makes zeros late there, and relies on the stacks of a plain scan when it
        pipelines collectives over trips.
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
    """`lax.scan(step, carries, xs, ...)`, given the `types` of its stacks; None: a stack in host memory, made as usual."""
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
