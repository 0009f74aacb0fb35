"""`custom_partitioning`: the rule that its author wrote is read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import NamedSharding, PartitionSpec

import autopar
from autopar.errors import RuleError
from autopar.ir.rules import rule_for
from tests.ir.rules.harness import check_function, only_eqn


def shardings(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


def partitioned(function, rule, change=lambda arguments: arguments, body=None, **notes):
    """`function` under a rule; its own body is told from `partition`'s by a constant that shapes do not change."""

    @custom_partitioning
    def whole(*args):
        return function(*args)

    def partition(mesh, arguments, results):
        return mesh, body or function, shardings(results), change(shardings(arguments))

    whole.def_partition(partition, sharding_rule=rule, **notes)
    return whole


def multiply(x, w):
    return jnp.tanh(x @ w)


def two(x):
    return x * 2, x.sum(-1)


HEADS = SdyShardingRule(
    (ArrayMapping("b", CompoundFactor("h", "d")),), (ArrayMapping("b", CompoundFactor("h", "d")),), h=8, d=2
)


@pytest.mark.parametrize(
    "function, rule, notes, shapes, expected",
    [
        (multiply, "b k, k n -> b n", {"reduction_factors": ("k",)}, [(8, 4), (4, 16)], "bk,kn->bn {whole k}"),
        (
            multiply,
            "... k, k n -> ... n",
            {},
            [(2, 8, 4), (4, 16)],
            "batch0_0batch0_1k,kn->batch0_0batch0_1n {whole k}",
        ),
        (two, "b d -> b d, b", {}, [(8, 4)], "bd->bd,b {whole d}"),
        (jnp.sin, "b d -> b d", {"need_replication_factors": ("d",)}, [(8, 4)], "bd->bd {whole d}"),
        (jnp.sin, "b (h d) -> b (h d)", {"h": 8, "d": 2}, [(8, 16)], "b(hd)->b(hd)"),
        (jnp.sin, HEADS, {}, [(8, 16)], "b(hd)->b(hd)"),
        (jnp.sin, lambda mesh, args, results: " ".join("abc"[: args[0].rank]) + " -> a b", {}, [(8, 16)], "ab->ab"),
    ],
)
def test_rule(function, rule, notes, shapes, expected):
    fun = partitioned(function, rule, **notes)
    assert str(rule_for(only_eqn(fun, *shapes))) == expected
    assert check_function(fun, *shapes) > 1


def test_flops_are_those_of_its_body():
    assert rule_for(only_eqn(partitioned(jnp.matmul, "b k, k n -> b n"), (8, 4), (4, 16))).flops == 2 * 8 * 4 * 16


def test_what_partition_returns_runs_on_each_device():
    """Not the function itself, which may be for whole arrays only."""
    fun = partitioned(jnp.sin, "b d -> b d", body=lambda x: jnp.sin(x) if x.shape == (4, 4) else x * jnp.nan)
    cluster = autopar.Cluster.local(jax.devices()[:2])
    step = autopar.parallelize(lambda w, x: (w, fun(x)), cluster=cluster, method=autopar.DataParallel())
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    np.testing.assert_allclose(step(np.ones(1, np.float32), x)[1], np.sin(x), rtol=1e-6)


@pytest.mark.parametrize(
    "rule, reason",
    [
        (None, "it was given no `sharding_rule`"),
        ("b d, d -> b d", "is for 3 arrays, and it has 2"),
        ("b -> b", "does not fit the shapes"),
        (lambda *_: "b d -> (b d", "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_whole(rule, reason):
    eqn = only_eqn(partitioned(jnp.sin, rule), (8, 4))
    with pytest.warns(UserWarning, match="computed whole on every device") as caught:
        assert rule_for(eqn).splittable() == ()
    assert reason in str(caught[0].message) and '@autopar.sharding_rule("b a -> b c")' in str(caught[0].message)


def test_partition_that_asks_for_something_else():
    def rows_whole(arguments):
        return jax.tree.map(lambda s: NamedSharding(s.mesh, PartitionSpec()), arguments)

    with pytest.raises(RuleError, match="does not follow") as caught:
        check_function(partitioned(jnp.sin, "b d -> b d", rows_whole), (8, 4), mesh_shape=(8,))
    assert "need_replication_factors" in str(caught.value)


def test_microbatches_on_a_mesh():
    """What a microbatch does of it is split over devices by the same rule."""
    fun = partitioned(lambda x, w: jnp.tanh(x @ w), "b k, k n -> b n")

    def step(w, x):
        return w - 0.1 * (x.T @ fun(x, w)), fun(x, w).mean()

    w, x = np.eye(8, dtype=np.float32), np.arange(64, dtype=np.float32).reshape(8, 8) / 64
    cluster, method = autopar.Cluster.local(jax.devices()[:2]), autopar.DataParallel(num_microbatches=4)
    results = autopar.parallelize(step, cluster=cluster, method=method, batch_argnums=(1,))(w, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), results, jax.jit(step)(w, x))
