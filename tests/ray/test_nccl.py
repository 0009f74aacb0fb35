"""NCCL between processes that share one GPU: correctness only. Each process passes for a host of its own."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import numpy as np
import pytest

from tests.patience import PATIENCE_SECONDS

pytestmark = pytest.mark.gpu

DTYPES = ("float32", "bfloat16", "float16", "bool", "int32", "uint8", "float8_e4m3fn", "complex64")
DTYPES += ("int4", "int2", "float4_e2m1fn")
SHAPES = ((), (1,), (7, 3), (129, 65), (1024, 1024))
REPEATS = 100


def rank_process(rank: int, num_sources: int, num_ranks: int, unique_id: Any, errors: Any) -> None:
    """Sources send what both sides can compute to every target; targets compare."""
    os.environ |= {
        "NCCL_HOSTID": f"host-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": str(0.6 / num_ranks),
    }
    import jax
    import jax.numpy as jnp

    from autopar.runtime.ray.transport.nccl import NcclChannel, Wanted

    try:
        channel = NcclChannel(unique_id, num_sources, num_ranks, {rank: jax.local_devices()[0]})

        def value(source: int, number: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
            drawn = np.random.default_rng((source, number)).integers(0, 2, shape)
            return jnp.asarray(drawn).astype(dtype)

        for number in range(REPEATS):
            kinds = [(SHAPES[(number + k) % len(SHAPES)], dtype) for k, dtype in enumerate(DTYPES)]
            if rank < num_sources:
                targets = range(num_ranks - num_sources)
                channel.send(number, [(value(rank, number, s, d), rank, t) for t in targets for s, d in kinds])
            else:
                wanted = [
                    Wanted(s, np.dtype(jnp.dtype(d)), source, rank - num_sources)
                    for source in range(num_sources)
                    for s, d in kinds
                ]
                for want, got in zip(wanted, channel.receive(number, wanted), strict=True):
                    expected = value(want.source, number, want.shape, want.dtype.name)
                    assert got.dtype == expected.dtype
                    np.testing.assert_array_equal(*(np.asarray(x).astype(np.complex64) for x in (got, expected)))
            assert channel.wait(PATIENCE_SECONDS, lambda: None) is None
    except BaseException as error:
        errors.put(f"rank {rank}: {error!r}")
        raise


@pytest.mark.parametrize("num_sources, num_targets", [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_between_processes(num_sources, num_targets):
    pytest.importorskip("cupy")
    from autopar.runtime.ray.transport.nccl import new_id

    context = multiprocessing.get_context("spawn")
    errors, count = context.Queue(), num_sources + num_targets
    arguments = (num_sources, count, new_id(), errors)
    ranks = [context.Process(target=rank_process, args=(rank, *arguments)) for rank in range(count)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(PATIENCE_SECONDS)
    left = [process for process in ranks if process.is_alive()]
    for process in left:
        process.kill()
    ends = [process.exitcode for process in ranks]  # one that is killed, or crashes, tells nothing
    assert not left and errors.empty() and not any(ends), (
        f"{'hung' if left else ends if errors.empty() else errors.get()}"
    )
