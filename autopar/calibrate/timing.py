"""How long a turn of a loop takes, on all devices at once.

In:     a `Case`, the devices, a deadline.
Out:    seconds of one turn; of starting a program.
Method: one compiled loop, called with few and with many turns: the difference has no dispatch in it. Medians of
        alternating calls, after one of each that is not counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from autopar.calibrate.cases import Case, dispatched

CALL_SECONDS = 0.02
"""A call has so many turns that it takes about so long."""
MOST_TURNS = 1 << 14
REPEATS = 5
NUM_ARGUMENTS = 8
"""Arrays that the empty program takes and returns."""


def turn_seconds(case: Case, devices: Sequence[jax.Device], deadline: float) -> float | None:
    """Seconds of one turn; None: the deadline came before it could be told."""
    places = jax.sharding.Mesh(np.array(devices).reshape(-1, case.group), ("g", "x"))
    sharding = NamedSharding(places, PartitionSpec(("g", "x")))

    def loop(turns: jax.Array, *arrays: jax.Array) -> jax.Array:
        first, *others = (array[0] for array in arrays)
        return lax.fori_loop(0, turns, lambda _, x: case.turn(x, *others), first)[None]

    specs = [PartitionSpec(), *([sharding.spec] * len(case.shapes))]
    run = jax.jit(jax.shard_map(loop, mesh=places, in_specs=tuple(specs), out_specs=sharding.spec, check_vma=False))
    arrays = [_filled(shape, dtype, sharding) for shape, dtype in zip(case.shapes, case.dtypes, strict=True)]

    def call(turns: int) -> float:
        started = time.perf_counter()
        jax.block_until_ready(run(jnp.int32(turns), *arrays))
        return time.perf_counter() - started

    call(1)
    turns, taken = 1, call(1)
    while taken < CALL_SECONDS / 4 and turns < MOST_TURNS and time.monotonic() < deadline:
        turns = min(MOST_TURNS, turns * 4)
        taken = call(turns)
    many = max(2, min(MOST_TURNS, round(turns * CALL_SECONDS / taken)))
    few = max(1, many // 8)
    call(many)
    differences = []
    for _ in range(REPEATS):
        if differences and time.monotonic() > deadline:
            break
        differences.append((call(many) - call(few)) / (many - few))
    seconds = statistics.median(differences)
    return seconds if seconds > 0 else None


def _filled(shape: tuple[int, ...], dtype: str, sharding: NamedSharding) -> jax.Array:
    """The same numbers, of the order of 1, on every device."""
    count = sharding.mesh.size

    def fill() -> jax.Array:
        number = lax.iota(jnp.float32, int(np.prod(shape)))
        return jnp.broadcast_to(jnp.sin(number).reshape(shape).astype(dtype), (count, *shape))

    return jax.jit(fill, out_shardings=sharding)()


def dispatch_seconds(devices: Sequence[jax.Device]) -> float:
    """Seconds of a program that does next to nothing, from its call to its end."""
    places = jax.sharding.Mesh(np.array(devices), ("x",))
    sharding = NamedSharding(places, PartitionSpec("x"))
    arrays = [jax.device_put(np.zeros(len(devices), np.float32), sharding) for _ in range(NUM_ARGUMENTS)]
    compiled = jax.jit(dispatched()).lower(*arrays).compile()
    taken = []
    for _ in range(4 * REPEATS):
        started = time.perf_counter()
        jax.block_until_ready(compiled(*arrays))
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[REPEATS:])
