"""Measures the seconds of a turn of a loop, on all devices at once.

In:     a `Case`, the devices, a deadline.
Out:    seconds of one turn, by wall clock and by processor time; of dispatching a program.
Method: one compiled loop, called with few and with many turns: their difference contains no dispatch. The shortest of
        alternating calls after a warm-up counts, since other load only adds to a call. Where devices share the host's
        cores, other programs may occupy these all the time; this process's processor time does not depend on that.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from autopar._jax import copied_to
from autopar.calibrate.cases import Case, dispatched, product

try:
    import resource
except ImportError:  # not on Windows: memory is taken as kept
    resource = None  # type: ignore[assignment]

CALL_SECONDS = 0.02
"""Approximate length of a call, which determines its number of turns."""
MOST_TURNS = 1 << 14
REPEATS = 5
NUM_ARGUMENTS = 1, 64
"""Numbers of arrays that empty programs take and return."""
KEPT_NEAR = 0.1
"""Between two sizes no further apart, it is not sought which memory is kept."""
NUM_COPIES = 20
"""Number of copies of an array that are started in a row."""
NUM_PROGRAMS, PROGRAM_TURNS = 8, 40
"""Number of programs that follow each other at once, and turns of a small product in each."""
_Call = Callable[[int], tuple[float, float]]
"""Runs so many turns; returns wall-clock seconds, and busy seconds per core."""


def turn_times(case: Case, devices: Sequence[jax.Device], deadline: float) -> tuple[float, float] | None:
    """Wall-clock seconds of one turn, and busy seconds per core if devices share cores (else wall-clock seconds again).

    None: the deadline came too early to tell.
    """
    call = _timed(case, devices)
    call(1)
    many = _enough_turns(call, deadline)
    few = max(1, many // 8)
    call(few), call(many)
    taken_by: dict[int, list[tuple[float, float]]] = {few: [], many: []}
    for _ in range(REPEATS):
        for count in (few, many):
            taken_by[count].append(call(count))
        if time.monotonic() > deadline:
            break
    shortest = {count: tuple(map(min, zip(*taken, strict=True))) for count, taken in taken_by.items()}
    clock, work = ((m - f) / (many - few) for m, f in zip(shortest[many], shortest[few], strict=True))
    return (clock, work) if clock > 0 and work > 0 else None


def _enough_turns(call: _Call, deadline: float) -> int:
    """The number of turns that take about `CALL_SECONDS`, or more; at least 2, and where there is no time to find out, few."""
    once, _ = call(1)
    turns, taken = 1, 0.0
    while taken < CALL_SECONDS / 4 and turns < MOST_TURNS and time.monotonic() < deadline:
        turns *= 2 if turns == 1 else 4
        call(turns)
        taken = call(turns)[0] - once  # without what each call takes to allocate arrays
    is_known = taken >= CALL_SECONDS / 4 or turns >= MOST_TURNS  # else it may be next to nothing, or less: noise
    if taken > CALL_SECONDS / 2 or not is_known:
        return max(2, turns)
    return max(2, round(turns * CALL_SECONDS / max(taken, CALL_SECONDS / 100)))


def _timed(case: Case, devices: Sequence[jax.Device]) -> _Call:
    """Compile the loop of a case, and bind it to arrays."""
    places = jax.sharding.Mesh(np.array(devices).reshape(-1, case.group), ("g", "x"))
    sharding = NamedSharding(places, PartitionSpec(("g", "x")))
    # On GPUs a loop of dynamic length synchronizes with the host in each turn; on CPUs it saves compiling for each length.
    is_static = devices[0].platform != "cpu"
    run = jax.jit(_loop(case, sharding, is_static), static_argnums=(0,) if is_static else ())
    arrays = [_filled(shape, case.dtype, sharding) for shape in case.shapes]
    cores = shared_cores(devices)

    def call(turns: int) -> tuple[float, float]:
        started, busy = time.perf_counter(), time.process_time()
        jax.block_until_ready(run(turns if is_static else np.int32(turns), *arrays))
        clock = time.perf_counter() - started
        return clock, (time.process_time() - busy) / cores if cores else clock

    return call


def _loop(case: Case, sharding: NamedSharding, is_static: bool) -> Callable[..., jax.Array]:
    """A function from (turns, arrays) to the first carried array, on each device."""

    def on_device(turns: Any, *arrays: jax.Array) -> jax.Array:
        made, others = (tuple(a[0] for a in part) for part in (arrays[: case.num_made], arrays[case.num_made :]))

        def turn(_: Any, made: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            anew = case.turn(*made, *others)
            return anew if isinstance(anew, tuple) else (anew,)

        return lax.fori_loop(0, turns, turn, made)[0][None]

    def loop(turns: Any, *arrays: jax.Array) -> jax.Array:
        specs, given = (sharding.spec,) * len(arrays), arrays
        function: Callable[..., jax.Array] = functools.partial(on_device, turns)
        if not is_static:
            function, specs, given = on_device, (PartitionSpec(), *specs), (turns, *arrays)
        split = jax.shard_map(function, mesh=sharding.mesh, in_specs=specs, out_specs=sharding.spec, check_vma=False)
        return split(*given)

    return loop


def undisturbed(case: Case, clock: float, work: float, stretched: list[float]) -> float:
    """Estimate the seconds of a turn on an otherwise idle machine, from wall-clock and busy seconds.

    Kernels keep their cores busy, so that busy seconds count, and other programs only stretch the wall clock. In collectives
    cores also wait, so that wall-clock seconds count, divided by the median stretch of kernels. `stretched`: the stretch
    (wall clock / busy) of each kernel so far; extended.
    """
    if case.collectives:
        return max(work, clock / statistics.median(stretched or [1.0]))
    stretched.append(max(1.0, clock / work))
    return min(clock, work)


def shared_cores(devices: Sequence[jax.Device]) -> int:
    """Number of host cores that devices share, at most one per device; 0: devices have their own cores."""
    return min(os.cpu_count() or 1, len(devices)) if devices[0].platform == "cpu" else 0


def _filled(shape: tuple[int, ...], dtype: str, sharding: NamedSharding) -> jax.Array:
    """An array of the same numbers, of the order of 1, on every device."""
    count = sharding.mesh.size

    def fill() -> jax.Array:
        number = lax.iota(jnp.float32, int(np.prod(shape)))
        return jnp.broadcast_to(jnp.sin(number).reshape(shape).astype(dtype), (count, *shape))

    return jax.jit(fill, out_shardings=sharding)()


def dispatch(devices: Sequence[jax.Device], among_others: bool = False) -> dict[str, float]:
    """Measure what it takes to start a program, and for each of the arrays that it takes and makes.

    `among_others`: measure it not only alone but also in a row of programs, and take the longer time. Where devices share
    cores, these rest while the last devices end one program, and while the threads of the next wake up.
    """
    few, many = NUM_ARGUMENTS
    with_few, with_many = (_started(devices, count) for count in NUM_ARGUMENTS)
    each = max(0.0, with_many - with_few) / (2 * (many - few))
    started = max(with_few, _among_others(devices)) if among_others else with_few
    return {"dispatch_seconds": max(0.0, started - 2 * few * each), "array_seconds": each}


def _among_others(devices: Sequence[jax.Device]) -> float:
    """Seconds that a program takes longer, started right behind others of its kind, than as a part of one that does all.

    Its arrays are small: what it costs to read them anew does not count.
    """
    case = product(1, 64, 64, 64, "float32")
    sharding = NamedSharding(jax.sharding.Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
    first, *others = [_filled(shape, case.dtype, sharding) for shape in case.shapes]
    run, cores = jax.jit(_loop(case, sharding, True), static_argnums=0), shared_cores(devices)
    taken: dict[int, list[tuple[float, float]]] = {1: [], NUM_PROGRAMS: []}
    for number in range(4 * REPEATS):
        for num_programs, times in taken.items():
            started, busy, made = time.perf_counter(), time.process_time(), first
            for _ in range(num_programs):
                made = run(PROGRAM_TURNS * NUM_PROGRAMS // num_programs, made, *others)
            jax.block_until_ready(made)
            clock = time.perf_counter() - started
            if number:  # the first compiles
                times.append((clock, (time.process_time() - busy) / cores if cores else clock))
    (one, one_busy), (several, several_busy) = (map(min, zip(*times, strict=True)) for times in taken.values())
    stretch = max(1.0, one / one_busy)  # by other programs on the same cores
    return max(several_busy - one_busy, (several - one) / stretch) / (NUM_PROGRAMS - 1)


def copied(devices: Sequence[jax.Device]) -> dict[str, float]:
    """Measure what it takes the cores to copy a small array to as many other devices: a field of `Achieved`.

    Copies are started one after the other, and none is waited for, as in a step: other programs run meanwhile, so that the
    seconds count for which cores are busy.
    """
    here, there = (NamedSharding(jax.sharding.Mesh(np.roll(devices, by), ("x",)), PartitionSpec("x")) for by in (0, 1))
    x = _filled((1,), "float32", here)
    taken = []
    for _ in range(2 * REPEATS):
        busy = time.process_time()
        jax.block_until_ready([copied_to([x], [there])[0] for _ in range(NUM_COPIES)])
        taken.append((time.process_time() - busy) / NUM_COPIES / shared_cores(devices))
    return {"copy_seconds": statistics.median(taken)}


def _started(devices: Sequence[jax.Device], num_arguments: int) -> float:
    """Seconds of a program that does next to nothing with so many arrays, from its call to its end."""
    places = jax.sharding.Mesh(np.array(devices), ("x",))
    sharding = NamedSharding(places, PartitionSpec("x"))
    arrays = [jax.device_put(np.zeros(len(devices), np.float32), sharding) for _ in range(num_arguments)]
    compiled = jax.jit(dispatched()).lower(*arrays).compile()
    taken = []
    for _ in range(4 * REPEATS):
        started = time.perf_counter()
        jax.block_until_ready(compiled(*arrays))
        taken.append(time.perf_counter() - started)
    return min(taken[REPEATS:])


def fresh_memory(devices: Sequence[jax.Device], sizes: Sequence[int]) -> dict[str, float]:
    """Measure up to which size the C library reuses freed memory, and the rate at which the system gives fresh memory.

    Compares programs that write to fresh memory with ones that write in place, on all devices at once; `sizes` are bytes
    per device, ascending. The largest size that is kept is then sought between two of them, since a program that needs a
    little more is priced with all its memory.
    """
    kept, rate, given = 0, math.inf, math.inf
    for size in sizes:
        seconds, new_bytes = _of_fresh(devices, size)
        if new_bytes < size / 2:
            kept, given = size, math.inf
        elif seconds > 0:
            rate, given = size / seconds, min(given, size)
    while kept and kept * (1 + KEPT_NEAR) < given < math.inf:
        middle = int(kept + given) // 2
        is_kept = _of_fresh(devices, middle)[1] < middle / 2
        kept, given = (middle, given) if is_kept else (kept, middle)
    return {"kept_bytes": float(kept), "fresh_bytes_per_second": rate}


def _of_fresh(devices: Sequence[jax.Device], num_bytes: int) -> tuple[float, float]:
    """Seconds to get fresh memory of so many bytes per device, and how many bytes the system really gave."""
    places = jax.sharding.Mesh(np.array(devices), ("x",))
    sharding = NamedSharding(places, PartitionSpec("x"))
    zeros = functools.partial(jnp.zeros, (len(devices), num_bytes // 4), "float32")
    x = jax.jit(zeros, out_shardings=sharding)()
    kept, fresh = (jax.jit(lambda x: x * 0.5 + 1.0, donate_argnums=argnums) for argnums in ((0,), ()))
    taken: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for number in range(REPEATS + 2):
        for is_kept in (True, False):
            started, before = time.process_time(), _new_pages()
            made = jax.block_until_ready((kept if is_kept else fresh)(x))
            if number > 1:
                taken[is_kept].append((time.process_time() - started, _new_pages() - before))
            x = made if is_kept else x
            del made
    (least, _), (most, _) = (map(min, zip(*taken[is_kept], strict=True)) for is_kept in (True, False))
    pages = statistics.median(pages for _, pages in taken[False])
    return (most - least) / max(1, shared_cores(devices)), pages * mmap.PAGESIZE / len(devices)


def _new_pages() -> int:
    """Number of pages that the system has given this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt if resource else 0
