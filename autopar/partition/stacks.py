"""Scans whose stacks are not allocated before they begin, or not at all.

In:     the arguments of `jax.lax.scan`.
Out:    its results.
Method: `lax.scan` writes rows into stacks of zeros. These depend on nothing, so that XLA:CPU makes them when the program
        begins, and the stacks of the backward loop are alive throughout the forward loop. Here the zeros depend on a
        carry. XLA for GPUs makes zeros late, except those of a type that an earlier loop stacks, too: it makes them with that
        loop's. So where a loop stacks what is of the type of something that it reads, its zeros depend on all that it reads;
        but not in a loop that communicates: XLA relies on plain stacks when it pipelines collectives over trips. New state
        in host memory overwrites the old, row by row: XLA would have both there, and copy whole stacks in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autopar._jax import on_host
from autopar.intra_op.sharded import Region, communicates
from autopar.partition.order import never_of
from autopar.partition.overlap import GPU_PLATFORMS

_Arrays = Sequence[jax.Array]


def begun_late(
    loop: Region,
    carries: Sequence[jax.Array],
    xs: Sequence[jax.Array],
    types: Mapping[int, jax.ShapeDtypeStruct],
    platform: str,
) -> Mapping[int, jax.Array]:
    """Zeros for those of a scan's stacks, by their numbers, that XLA would make too early; `types`: of its own stacks."""
    if platform == "cpu":
        return late_stacks(sorted(carries, key=lambda array: -array.size)[:1], types)
    if platform not in GPU_PLATFORMS or communicates(loop):
        return {}
    here = [array for array in (*carries, *xs) if array.size and not on_host(jax.typeof(array))]
    given = {(array.shape, array.dtype) for array in here}
    alike = {k: kind for k, kind in types.items() if (kind.shape, kind.dtype) in given}
    return late_stacks([lax.optimization_barrier(array) for array in here], alike) if alike else {}


def late_stacks(earlier: Sequence[jax.Array], types: Mapping[int, jax.ShapeDtypeStruct]) -> Mapping[int, jax.Array]:
    """Stacks of zeros of these types, by their numbers, that are made no earlier than some arrays; {} without these."""
    if not any(array.size for array in earlier) or not any(kind.shape[0] for kind in types.values()):
        return {}
    late = never_of(earlier)
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
