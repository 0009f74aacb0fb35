"""One mesh within memory: more of it is never worse."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import autopar
from tests.small_mlp import train_step


@pytest.mark.parametrize("width, rows", [(64, 128), (64, 256), (32, 64)])
def test_more_memory_makes_no_step_slower(width, rows):
    """Latencies are most of such a step, and prices are 5 to 10 % off the clock: of answers that cost nearly the same, those
    within fewer bytes may be faster. Of 128 rows the step took 53.0 us within 0.7 of its memory, and 56.0 within 0.85."""
    args = (
        [jax.ShapeDtypeStruct((width, width), jnp.float32)] * 2,
        {name: jax.ShapeDtypeStruct((rows, width), jnp.float32) for name in ("x", "y")},
    )

    def plan(budget):
        method = autopar.ShardParallel(mesh_shape=(2, 2), memory_budget_bytes=budget)
        cluster = autopar.Cluster.of("4 h100")
        return autopar.parallelize(train_step, cluster=cluster, method=method, batch_argnums=1).plan(*args).cost

    roomy = plan(None)
    peak = max(roomy.peak_bytes)
    found = [plan(int(part * peak)) for part in (0.7, 0.85, 1.0)]
    assert all(max(cost.peak_bytes) <= part * peak for cost, part in zip(found, (0.7, 0.85, 1.0), strict=True))
    seconds = [cost.step_seconds for cost in (*found, roomy)]
    assert seconds == sorted(seconds, reverse=True), seconds
