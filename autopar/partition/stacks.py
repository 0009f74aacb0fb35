"""Scans whose stacks are not allocated before they begin, or not at all.

In:     the arguments of `jax.lax.scan`.
Out:    its results.
Method: `lax.scan` writes rows into stacks of zeros. These depend on nothing, so that XLA:CPU makes them when the program
        begins, and the stacks of the backward loop are alive throughout the forward loop. Here the zeros depend on a
        carry. For GPUs a plain scan is used: XLA makes zeros late there, and relies on the stacks of a plain scan when it
        pipelines collectives over trips. New state in host memory overwrites the old, row by row: XLA would have both there,
        and copy whole stacks in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar._jax import on_host
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


def scan_over_old_rows(
    scan: Callable[..., Any],
    step: Callable[[_Arrays, _Arrays], tuple[_Arrays, _Arrays]],
    carries: tuple[jax.Array, ...],
    xs: tuple[jax.Array, ...],
    over: Mapping[int, int],
    *,
    length: int,
    reverse: bool,
    unroll: Any,
) -> tuple[_Arrays, _Arrays]:
    """`scan(step, carries, xs, ...)`, some of whose stacks overwrite what it reads.

    `over`: number of such a stack -> number of the one in `xs` that it overwrites.
    """
    if not over:
        return scan(step, carries, xs, length=length, reverse=reverse, unroll=unroll)
    read = list(over.values())
    others = tuple(x for k, x in enumerate(xs) if k not in read)

    def write(carried: Any, rows: _Arrays) -> tuple[Any, _Arrays]:
        trip, stacks, held = carried[0], carried[1 : 1 + len(read)], carried[1 + len(read) :]
        at = length - 1 - trip if reverse else trip
        own = {k: lax.dynamic_index_in_dim(stack, at, 0, keepdims=False) for k, stack in zip(read, stacks, strict=True)}
        left = iter(rows)
        held, made = step(held, [own[k] if k in own else next(left) for k in range(len(xs))])
        written = [
            lax.dynamic_update_index_in_dim(stack, made[k], at, 0) for k, stack in zip(over, stacks, strict=True)
        ]
        return (trip + 1, *written, *held), [row for k, row in enumerate(made) if k not in over]

    start = jnp.zeros((), jnp.int32), *(xs[k] for k in read), *carries
    last, made = scan(write, start, others, length=length, reverse=reverse, unroll=unroll)
    stacks, left = dict(zip(over, last[1:], strict=False)), iter(made)
    return last[1 + len(read) :], [stacks[k] if k in stacks else next(left) for k in range(len(made) + len(over))]


def overwritten(
    types: Sequence[jax.ShapeDtypeStruct], makes_there: Sequence[bool], xs: Sequence[jax.Array], free: Sequence[bool]
) -> dict[int, int]:
    """For stacks that a scan makes in host memory, the first of `xs` there of the same type that nothing else reads.

    `types`: of the stacks that it makes; `makes_there`: whether in host memory. `free`: of `xs`, whether it is read for the
    last time.
    """
    old = [k for k, x in enumerate(xs) if free[k] and on_host(jax.typeof(x))]
    found: dict[int, int] = {}
    for number, kind in enumerate(types):
        same = [k for k in old if (xs[k].shape, xs[k].dtype) == (kind.shape, kind.dtype)]
        if makes_there[number] and same:
            found[number] = same[0]
            old.remove(same[0])
    return found
