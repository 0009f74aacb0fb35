"""What enters a per-device program."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

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


def test_no_program_reads_an_empty_array():
    """XLA of jaxlib 0.11.2 ends the process where an operand of a manual computation is empty and read."""
    cluster = autopar.Cluster.local(jax.devices(), device=SLOW, intra=QUICK)
    found = autopar.parallelize(step, cluster=cluster, method=autopar.DataParallel(zero=3), donate_argnums=())
    state, x = arguments()
    for got, wanted in zip(jax.tree.leaves(found(state, x)), jax.tree.leaves(jax.jit(step)(state, x)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)
    compiled = found.compile(state, x)
    for function in compiled.functions.values():
        structs = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in function.inputs]
        (manual,) = open_jaxpr(jax.make_jaxpr(function.code)(*structs))[0].eqns
        body = manual.params["jaxpr"]
        empty = {var for var in body.invars if not var.aval.size}
        read = {a for eqn in body.eqns for a in eqn.invars if isinstance(a, Var)} | {*body.outvars}
        assert empty and empty.isdisjoint(read)
