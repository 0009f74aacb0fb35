"""How long a turn of a loop takes, on all devices at once.

In:     a `Case`, the devices, a deadline.
Out:    seconds of one turn; of starting a program.
Method: one compiled loop, called with few and with many turns: the difference has no dispatch in it. The shortest of
        alternating calls, after one of each that is not counted: whatever else the machine does only adds to a call.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from typing import Any

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

    def loop(turns: Any, *arrays: jax.Array) -> jax.Array:
        def on_device(turns: Any, *arrays: jax.Array) -> jax.Array:
            first, *others = (array[0] for array in arrays)
            return lax.fori_loop(0, turns, lambda _, x: case.turn(x, *others), first)[None]

        specs = (sharding.spec,) * len(arrays)
        if is_static:
            on_device, specs, given = functools.partial(on_device, turns), specs, arrays
        else:
            specs, given = (PartitionSpec(), *specs), (turns, *arrays)
        return jax.shard_map(on_device, mesh=places, in_specs=specs, out_specs=sharding.spec, check_vma=False)(*given)

    # A loop whose length is known only when it runs asks the host after each turn, on a GPU; on a CPU it need not be compiled
    # for each length.
    is_static = devices[0].platform != "cpu"
    run = jax.jit(loop, static_argnums=(0,) if is_static else ())
    arrays = [_filled(shape, dtype, sharding) for shape, dtype in zip(case.shapes, case.dtypes, strict=True)]

    def call(turns: int) -> float:
        started = time.perf_counter()
        jax.block_until_ready(run(turns if is_static else np.int32(turns), *arrays))
        return time.perf_counter() - started

    call(1)
    turns, taken = 1, call(1)
    while taken < CALL_SECONDS / 4 and turns < MOST_TURNS and time.monotonic() < deadline:
        turns *= 8
        call(turns)
        taken = call(turns)
    many = turns if taken > CALL_SECONDS / 2 else round(turns * CALL_SECONDS / taken)
    many, few = max(2, many), max(1, many // 8)
    call(few), call(many)
    taken_by: dict[int, list[float]] = {few: [], many: []}
    for _ in range(REPEATS):
        for count in (few, many):
            taken_by[count].append(call(count))
        if time.monotonic() > deadline:
            break
    seconds = (min(taken_by[many]) - min(taken_by[few])) / (many - few)
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
    return min(taken[REPEATS:])


def fresh_bytes_per_second(devices: Sequence[jax.Device], num_bytes: int) -> float:
    """Rate at which a program gets memory: one that writes where it reads beside one that does not."""
    places = jax.sharding.Mesh(np.array(devices), ("x",))
    sharding = NamedSharding(places, PartitionSpec("x"))
    x = _filled((num_bytes // 4,), "float32", sharding)
    kept, fresh = (jax.jit(lambda x: x * 0.5 + 1.0, donate_argnums=argnums) for argnums in ((0,), ()))
    taken: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * REPEATS):
        for is_kept in (True, False):
            started = time.perf_counter()
            made = jax.block_until_ready((kept if is_kept else fresh)(x))
            if number > 1:
                taken[is_kept].append(time.perf_counter() - started)
            x = made if is_kept else x
            del made
    more = min(taken[False]) - min(taken[True])
    return num_bytes / more if more > 0 else math.inf
