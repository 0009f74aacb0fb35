"""What waits for something else is still what it was, and nothing is made for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar._jax import Literal, all_equations
from autopar.partition.order import after

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
