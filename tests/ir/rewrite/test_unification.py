"""Two values are unified where they are computed alike, and each is looked at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from autopar.ir.build import flat_function
from autopar.ir.dataflow import makers
from autopar.ir.rewrite.unification import unified

X = jax.ShapeDtypeStruct((4,), jnp.float32)


def doubled_often(x):
    for _ in range(60):
        x = jnp.sin(x) * x
    return x


def test_shared_values_are_looked_at_once():
    """Each operation reads the one before twice: there are 2**60 ways back."""
    one, other = flat_function(doubled_often, X), flat_function(doubled_often, X)
    made_by = {**makers(one.eqns), **makers(other.eqns)}
    found = unified([(one.outvars[0], other.outvars[0])], made_by, one.invars, {})
    assert found is not None and found[one.invars[0]] is other.invars[0]


def test_one_value_does_not_stand_for_two():
    one = flat_function(lambda x: x * x, X)
    other = flat_function(lambda x, y: x * y, X, X)
    made_by = {**makers(one.eqns), **makers(other.eqns)}
    assert unified([(one.outvars[0], other.outvars[0])], made_by, one.invars, {}) is None
