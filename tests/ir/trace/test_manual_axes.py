"""A `shard_map` of the user is the work of all of its devices, on plain arrays: the same values, no mesh axis left."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autopar
from autopar._jax import all_equations
from autopar.ir.gradient import is_backward
from autopar.ir.rules.replicated import list_of
from autopar.ir.source import source_line
from tests.ir.traced import traced

RANDOM = np.random.default_rng(0)
W, X = (RANDOM.normal(scale=0.3, size=shape).astype(np.float32) for shape in ((8, 16), (32, 8)))


def mesh(**axes):
    return Mesh(np.array(jax.devices()[: int(np.prod([*axes.values()]))]).reshape(*axes.values()), tuple(axes))


def megatron(w, x):
    def layer(w, x):
        return x + lax.psum(jnp.tanh(x @ w) @ w.T, "model")

    specs = {"in_specs": (P(None, "model"), P("data")), "out_specs": P("data")}
    return (jax.shard_map(layer, mesh=mesh(data=2, model=4), **specs)(w, x) ** 2).mean()


def gathered_weights(w, x):
    def loss(w, x):
        whole = lax.all_gather(w, "all", tiled=True)
        rows = lax.psum_scatter(x @ whole, "all", scatter_dimension=1, tiled=True)
        largest = lax.pmax(lax.stop_gradient(jnp.abs(rows).max()), "all")
        return lax.pmean((rows * lax.axis_index("all") / largest).mean(), "all")

    return jax.shard_map(loss, mesh=mesh(all=8), in_specs=(P("all"), P("all")), out_specs=P(), check_vma=False)(w, x)


def ring(w, x):
    def attend(q, k):
        def turn(carry, _):
            k, total = carry
            return (lax.ppermute(k, "ring", [(j, (j + 1) % 4) for j in range(4)]), total + jnp.tanh(q @ k.T) @ k), None

        (_, total), _ = lax.scan(turn, (k, q * 0), None, length=4)
        return total

    q, k = x @ w, x @ w[:, ::-1]
    over_ring = jax.shard_map(attend, mesh=mesh(ring=4), in_specs=(P("ring"), P("ring")), out_specs=P("ring"))
    return (over_ring(q, k) ** 2).sum()


def experts(w, x):
    def exchange(w, x):
        sent = lax.all_to_all(x.reshape(4, 2, 8), "expert", 0, 0)
        return lax.all_to_all(jax.nn.relu(sent @ w) @ w.T, "expert", 0, 0).reshape(x.shape)

    specs = {"in_specs": (P(None, "expert"), P("expert")), "out_specs": P("expert")}
    return (jax.shard_map(exchange, mesh=mesh(expert=4), **specs)(w, x) ** 2).mean()


def equal_unknown_to_jax(w, x):
    """`check_vma=False` allows a result that only its author knows to be the same on all devices."""

    def first(x):
        return lax.all_gather(x.sum(0), "all")[0 * lax.axis_index("all")]

    alike = jax.shard_map(first, mesh=mesh(all=8), in_specs=P("all"), out_specs=P(), check_vma=False)(x)
    return (alike @ w).sum()


def mapped_by_pmap(w, x):
    losses = jax.pmap(lambda w, x: lax.pmean(jnp.tanh(x @ w).mean(), "i"), axis_name="i", in_axes=(None, 0))
    return losses(w, x.reshape(8, 4, 8))[0]


@pytest.mark.parametrize("loss", [megatron, gathered_weights, ring, experts, equal_unknown_to_jax, mapped_by_pmap])
def test_all_devices_compute_the_same(loss):
    def step(w, x):
        return jax.value_and_grad(loss, (0, 1))(w, x)

    program = traced(step, W, X)
    assert not [eqn for eqn in all_equations(program) if list_of(eqn.primitive.name) == "COLLECTIVE"]


def test_lines_and_passes_are_kept():
    program = traced(lambda w, x: jax.grad(megatron)(w, x), W, X)
    products = [eqn for eqn in program.eqns if eqn.primitive.name == "dot_general"]
    assert {source_line(eqn).split(" ")[1] for eqn in products} == {"(layer)"}
    assert [is_backward(eqn) for eqn in products] == [False, False, True, True, True]


def test_a_step_by_hand_is_planned_anew():
    """A step written for eight devices of data parallelism, its keys folded by device, in two stages of four."""

    def step(w, batch, key):
        def loss(w, x, key):
            noise = jax.random.normal(jax.random.fold_in(key, lax.axis_index("all")), x.shape)
            value, grad = jax.value_and_grad(lambda w: (jnp.tanh(jnp.tanh((x + noise) @ w) @ w.T) ** 2).mean())(w)
            return lax.pmean(value, "all"), lax.pmean(grad, "all")

        over = {"mesh": mesh(all=8), "in_specs": (P(), P("all"), P()), "out_specs": P(), "check_vma": False}
        value, grad = jax.shard_map(loss, **over)(w, batch, key)
        return w - 0.1 * grad, value

    key = jax.random.key(0)
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=2)
    got = autopar.parallelize(step, method=method, batch_argnums=1, donate_argnums=())(W, X, key)
    for value, expected in zip(got, jax.jit(step)(W, X, key), strict=True):
        np.testing.assert_allclose(value, expected, rtol=2e-5, atol=1e-6)
