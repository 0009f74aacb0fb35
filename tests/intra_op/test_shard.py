"""One mesh within memory: more of it is never worse."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.intra_op import instance
from autopar.tuning import TUNING
from tests.small_mlp import train_step


def plan_of(width, rows, budget):
    """Seconds and bytes of a small model on four devices within a budget."""
    args = (
        [jax.ShapeDtypeStruct((width, width), jnp.float32)] * 2,
        {name: jax.ShapeDtypeStruct((rows, width), jnp.float32) for name in ("x", "y")},
    )
    method = autopar.ShardParallel(mesh_shape=(2, 2), memory_budget_bytes=budget)
    cluster = autopar.Cluster.of("4 h100")
    return autopar.parallelize(train_step, cluster=cluster, method=method, batch_argnums=1).plan(*args).cost


MISSED = pytest.mark.xfail(strict=True, reason="53.2 us within 0.7 of its memory and 56.1 within 0.85")


@pytest.mark.parametrize("width, rows", [(64, 128), (32, 64), pytest.param(64, 256, marks=MISSED)])
def test_more_memory_makes_no_step_slower(width, rows):
    """Latencies are most of such a step, and prices are 5 to 10 % off the clock: of answers that cost nearly the same, those
    within fewer bytes may be faster. Of 128 rows the step took 53.0 us within 0.7 of its memory, and 56.0 within 0.85."""

    def plan(budget):
        return plan_of(width, rows, budget)

    roomy = plan(None)
    peak = max(roomy.peak_bytes)
    found = [plan(int(part * peak)) for part in (0.7, 0.85, 1.0)]
    assert all(max(cost.peak_bytes) <= part * peak for cost, part in zip(found, (0.7, 0.85, 1.0), strict=True))
    seconds = [cost.step_seconds for cost in (*found, roomy)]
    assert seconds == sorted(seconds, reverse=True), seconds


def test_fewer_bytes_are_not_met_at_any_price(monkeypatch):
    """Few problems are solved to find an answer within them: toys were planned for half a minute, for none that is faster."""
    planes, real = [], instance.solve_constrained

    def noted(*args, **known):
        planes.append(args[-1])
        return real(*args, **known)

    monkeypatch.setattr(instance, "solve_constrained", noted)
    plan_of(64, 128, int(0.85 * max(plan_of(64, 128, None).peak_bytes)))
    assert set(planes) == {TUNING.cutting_planes, TUNING.less_planes} and TUNING.less_planes <= 5


def test_the_memory_of_a_slower_known_plan_is_not_computed(monkeypatch):
    """ZeRO is slower here than the best plan, whatever memory it takes: its program is put on the clock and not measured."""
    lowered, measured = [], []
    for name, noted in (("lower", lowered), ("fullest_moments", measured)):
        real = getattr(instance, name)
        monkeypatch.setattr(
            instance, name, lambda *args, real=real, noted=noted, **how: noted.append(args) or real(*args, **how)
        )
    plan_of(64, 128, None)
    assert len(measured) < len(lowered)


def test_smaller_messages_are_tried_where_memory_makes_the_step_dear():
    """Something fits with all gradients in one message, and takes a seventh longer than what fits with four."""
    rows = {name: jax.ShapeDtypeStruct((512, 256), jnp.float32) for name in ("x", "y")}
    args = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 4, rows

    def plan(budget=None):
        method = autopar.Auto(memory_budget_bytes=budget, offload="never")
        cluster = autopar.Cluster.of("8 h100")
        return autopar.parallelize(train_step, cluster=cluster, method=method, batch_argnums=1).plan(*args)

    free, tight = plan(), plan(3_500_000)
    assert max(free.cost.peak_bytes) > 1.2 * max(tight.cost.peak_bytes) and max(tight.cost.peak_bytes) <= 3_500_000
    assert tight.stages[0].bucket_bytes < free.stages[0].bucket_bytes
    assert tight.cost.step_seconds < 1.05 * free.cost.step_seconds
