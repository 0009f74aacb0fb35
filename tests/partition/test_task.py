"""What enters a per-device program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar._jax import Var, open_jaxpr
from tests.sweep import QUICK, SLOW


def step(state, x):
    """Writes the whole of an array, as `variable[...] = value` does, by an empty index; an empty array is part of the state."""
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
    new = {"w": state["w"] - 0.1 * grad, "mean": state["mean"].at[...].set(x.mean(0)), "none": state["none"] * 2}
    return new, loss + state["none"].sum()


def arguments():
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    return {"w": jnp.ones((8, 8)), "mean": jnp.zeros(8), "none": jnp.zeros((0, 3))}, x


def samples_of_nothing():
    _, x = arguments()
    return jnp.eye(8), x, jnp.zeros((16, 0))


def of_nothing(state, x, none):
    """The batch has columns that are none; so has what is told of each sample."""
    loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) @ w) + none.sum())(state)
    return state - 0.1 * grad, (loss, none * 2)


@pytest.mark.parametrize(
    "step, arguments, method",
    [
        (step, arguments, autopar.DataParallel(zero=3)),
        (of_nothing, samples_of_nothing, autopar.DataParallel(num_microbatches=2)),
        (of_nothing, samples_of_nothing, autopar.PipelineParallel(num_stages=2, num_microbatches=2)),
    ],
)
def test_no_program_reads_an_empty_array(step, arguments, method):
    """XLA of jaxlib 0.11.2 ends the process where an operand of a manual computation is empty and read."""
    cluster = autopar.Cluster.local(jax.devices(), device=SLOW, intra=QUICK)
    found = autopar.parallelize(step, cluster=cluster, method=method, donate_argnums=())
    given, emptied = arguments(), 0
    for got, wanted in zip(jax.tree.leaves(found(*given)), jax.tree.leaves(jax.jit(step)(*given)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)
    for function in found.compile(*given).functions.values():
        structs = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in function.inputs]
        eqns = open_jaxpr(jax.make_jaxpr(function.code)(*structs))[0].eqns
        body = next(eqn.params["jaxpr"] for eqn in eqns if eqn.primitive.name == "shard_map")
        empty = {var for var in body.invars if not var.aval.size}
        read = [a for eqn in body.eqns for a in eqn.invars] + body.outvars
        assert empty.isdisjoint(a for a in read if isinstance(a, Var))
        emptied += len(empty)
    assert emptied
