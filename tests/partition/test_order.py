"""What waits for something else is still what it was, and nothing is made for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar._jax import Literal, all_equations
from autopar.partition.order import after
from tests.sweep import QUICK, SLOW

DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "complex64", "int8", "uint32", "bool"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_waits_stays_as_it_is_and_no_array_is_made_beside_it(dtype):
    """Zeros to choose from would be one with those of the program."""
    operand = jnp.array([[0, 1], [2, 3]]).astype(dtype)
    assert np.array_equal(jax.jit(after)(operand, jnp.arange(3.0)), operand)
    eqns = list(all_equations(jax.make_jaxpr(after)(operand, jnp.arange(3.0)).jaxpr))
    made = [eqn for eqn in eqns if all(isinstance(atom, Literal) for atom in eqn.invars)]
    assert not [eqn for eqn in made if eqn.outvars[0].aval.shape == operand.shape]


@pytest.mark.parametrize("count", [1, 3])
def test_what_waits_looks_at_a_number_and_not_at_the_array(count):
    """A kernel that looks into the array would hold it until it runs."""
    awaited = [jnp.full((4, 5), 2.0 + k) for k in range(count)]
    eqns = jax.make_jaxpr(after)(jnp.ones(3), *awaited).jaxpr.eqns
    made_by = {var: eqn for eqn in eqns for var in eqn.outvars}
    signs = [made_by[var] for var in eqns[-1].invars if var in made_by and var.aval.dtype == bool]
    assert [(eqn.primitive.name, eqn.outvars[0].aval.shape) for eqn in signs] == [("optimization_barrier", ())]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_8_bit_floats_wait_without_arithmetic(dtype):
    """XLA for GPUs computes it in 16 bits, in a kernel of its own whose result it keeps."""
    operand = jnp.array([[0.0, -1.0], [2.0, jnp.nan]]).astype(dtype)
    eqns = list(all_equations(jax.make_jaxpr(after)(operand, jnp.arange(3.0)).jaxpr))
    assert "neg" not in [eqn.primitive.name for eqn in eqns]
    waits = jax.jit(after)(operand, jnp.arange(3.0))
    assert np.array_equal(np.asarray(waits).view(np.uint8), np.asarray(operand).view(np.uint8))


def test_what_is_gathered_in_one_message_does_not_keep_it():
    """Pieces that are read from the packed array would keep all of it until the last of them is read."""

    def step(state, x):
        loss, grads = jax.value_and_grad(lambda s: jnp.mean((jnp.tanh(x @ s["up"]) @ s["down"]) ** 2))(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    cluster = autopar.Cluster.local(jax.devices(), device=SLOW, intra=QUICK)
    found = autopar.parallelize(step, cluster=cluster, method=autopar.DataParallel(zero=3), donate_argnums=())
    weights = {"up": jnp.ones((64, 128)), "down": jnp.ones((128, 64))}
    compiled = found.compile(weights, np.ones((256, 64), np.float32))
    (function,) = compiled.functions.values()
    structs = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in function.inputs]
    eqns = list(all_equations(jax.make_jaxpr(function.code)(*structs).jaxpr))
    (gather,) = [eqn for eqn in eqns if eqn.primitive.name == "all_gather"]
    barriers = [eqn for eqn in eqns if eqn.primitive.name == "optimization_barrier"]
    assert [v.aval.shape for e in barriers for v in e.outvars if len(e.outvars) == 2] == [(64, 128), (128, 64)]
    assert gather.outvars[0].aval.size == 2 * 64 * 128
