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


def late_stacks(carries: Sequence[jax.Array], types: Mapping[int, jax.ShapeDtypeStruct]) -> Mapping[int, jax.Array]:
    """Stacks of zeros of these types, by their numbers, that are made no earlier than the largest carry; {} without one."""
    first = max(carries, key=lambda array: array.size, default=None)
    if first is None or not first.size or not any(kind.shape[0] for kind in types.values()):
        return {}
    late = never(first)
    return {
        k: jnp.broadcast_to(jnp.where(late, jnp.ones((), kind.dtype), jnp.zeros((), kind.dtype)), kind.shape)
        for k, kind in types.items()
        if kind.shape[0]
    }


def scan_into(
    begun: Mapping[int, jax.Array],
    over: Mapping[int, int],
    step: Callable[[_Arrays, _Arrays], tuple[_Arrays, _Arrays]],
    carries: tuple[jax.Array, ...],
    xs: tuple[jax.Array, ...],
    *,
    length: int,
    reverse: bool,
    unroll: Any,
) -> tuple[_Arrays, _Arrays]:
    """`lax.scan(step, carries, xs, ...)`, some of whose stacks are written, row by row, into arrays that there are.

    `begun`: number of such a stack -> the array. `over`: number of a stack -> number of the one in `xs` that it overwrites.
    """
    if not begun and not over:
        return lax.scan(step, carries, xs, length=length, reverse=reverse, unroll=unroll)
    there = [k for k in range(len(xs)) if k not in over.values()]

    def write(carried: Any, rows: _Arrays) -> tuple[Any, _Arrays]:
        trip, stacks, held = carried
        at = length - 1 - trip if reverse else trip
        old = {over[k]: lax.dynamic_index_in_dim(stacks[k], at, 0, keepdims=False) for k in over}
        read = old | dict(zip(there, rows, strict=True))
        held, made = step(held, [read[k] for k in range(len(xs))])
        written = {k: lax.dynamic_update_index_in_dim(stack, made[k], at, 0) for k, stack in stacks.items()}
        return (trip + 1, written, tuple(held)), [row for k, row in enumerate(made) if k not in stacks]

    start = jnp.zeros((), jnp.int32), {**{k: xs[at] for k, at in over.items()}, **begun}, carries
    given = tuple(xs[k] for k in there)
    (_, stacks, last), others = lax.scan(write, start, given, length=length, reverse=reverse, unroll=unroll)
    left = iter(others)
    return last, [stacks[k] if k in stacks else next(left) for k in range(len(stacks) + len(others))]


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
