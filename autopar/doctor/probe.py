"""The probes: each tests one part of the machine by using it. Run as `python -m autopar.doctor.probe NAME`.

In:     the name of a function here.
Out:    facts, as marked JSON lines, each as soon as it is known, which shows where a probe hangs.
Method: each test is the least that training needs: every device computes, all devices reduce, each pair of devices transfers
        bytes, which are compared, a solver solves, orbax writes and reads.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autopar.doctor.child import MARK

TRANSFER_BYTES = 16 * 2**20


def report(**facts: Any) -> None:
    """Send facts to the process that started this one."""
    print(MARK + json.dumps(facts), flush=True)


def devices() -> None:
    """Test JAX and its devices: a computation on each, a sum over all, a transfer between each pair."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    found = jax.devices()
    report(
        backend=jax.default_backend(),
        processes=jax.process_count(),
        devices=[{"id": d.id, "kind": d.device_kind, "memory_bytes": _memory_bytes(d)} for d in found],
    )
    for device in found:
        total = jnp.sum(jax.device_put(jnp.arange(1000.0), device))
        assert total == 499500, f"{device} adds 0 to 999 to {total}"
    report(computed=True)
    mesh = Mesh(np.array(found), ("x",))
    split, whole = PartitionSpec("x"), PartitionSpec()
    add = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=split, out_specs=whole))
    total = add(jax.device_put(jnp.arange(float(len(found))), NamedSharding(mesh, split)))
    expected = len(found) * (len(found) - 1) / 2
    assert total == expected, f"the devices' numbers add up to {total}, not {expected}"
    report(reduced=True, nccl=_loaded_nccl() if jax.default_backend() == "gpu" else None)
    data = np.random.default_rng(0).integers(0, 256, TRANSFER_BYTES, np.uint8)
    rates: list[list[Any]] = []
    for source in found:
        there = jax.device_put(data, source)
        for target in found:
            if source == target:
                continue
            report(transferring=[source.id, target.id])
            moved = jax.block_until_ready(jax.device_put(there, target))
            assert np.array_equal(np.asarray(moved), data), f"bytes from {source} arrive at {target} changed"
            seconds = []
            for _ in range(3):
                started = time.perf_counter()
                jax.block_until_ready(jax.device_put(there, target))
                seconds.append(time.perf_counter() - started)
            rates.append([source.id, target.id, TRANSFER_BYTES / min(seconds)])
    report(transferring=None, bytes_per_second=rates)


def solver_highs() -> None:
    """Solve a small problem with HiGHS, the default."""
    _solve("highs")


def solver_cbc() -> None:
    """Solve the same problem with CBC."""
    _solve("cbc")


def _solve(name: str) -> None:
    """Solve a problem whose optimum is known."""
    import numpy as np

    from autopar.intra_op.ilp import solve_ilp
    from autopar.intra_op.problem import Problem

    problem = Problem([np.array([1.0, 3.0]), np.array([2.0, 1.0])], {(0, 1): np.array([[5.0, 9.0], [0.0, 0.0]])}, [])
    solution = solve_ilp(problem, name, 30.0, 1e-6)
    assert solution.choices == (1, 1), f"the least is (1, 1), it found {solution.choices}"
    report(solver=solution.solver)


def orbax() -> None:
    """Save and restore a checkpoint."""
    import numpy as np

    from autopar import checkpoint

    with tempfile.TemporaryDirectory() as directory:
        checkpoint.save(directory, {"a": np.arange(3)}, 0).wait()
        assert checkpoint.restore(directory, {"a": np.arange(3)})["a"].tolist() == [0, 1, 2]
    report(restored=True)


def cupy() -> None:
    """Test CuPy, and report the NCCL that it loads."""
    import cupy

    report(version=cupy.__version__, devices=cupy.cuda.runtime.getDeviceCount())
    assert int(cupy.arange(5).sum()) == 10
    from cupy.cuda import nccl

    report(nccl={"path": _loaded_nccl()["path"], "version": nccl.get_version()})


def _memory_bytes(device: Any) -> int | None:
    try:
        stats = device.memory_stats() or {}
    except Exception:  # not every backend reports it
        return None
    return stats.get("bytes_limit")


def _loaded_nccl() -> dict[str, Any]:
    """The libnccl of this process; if none is loaded yet, the one that would be."""
    import ctypes

    path = _mapped("libnccl.so")
    try:
        library = ctypes.CDLL(path or "libnccl.so.2")
    except OSError as error:
        return {"path": None, "version": None, "error": str(error)}
    version = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(version))
    return {"path": path or _mapped("libnccl.so"), "version": version.value}


def _mapped(name: str) -> str | None:
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    return next((line.split()[-1] for line in maps.splitlines() if name in line), None)


PROBES: dict[str, Callable[[], None]] = {f.__name__: f for f in (devices, solver_highs, solver_cbc, orbax, cupy)}

if __name__ == "__main__":
    PROBES[sys.argv[1]]()
