"""Folding of known scalars changes no bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar._jax import Literal
from autopar.ir.trace.trace import trace_step

VALUES = [0.1, -3.7, 1e-30, 3.0]


@pytest.mark.parametrize("op", [lax.add, lax.sub, lax.mul, lax.div, lax.lt, lax.ge, lax.eq])
@pytest.mark.parametrize("x", VALUES)
@pytest.mark.parametrize("y", VALUES)
def test_exact(op, x, y):
    program = trace_step(lambda n: (n, op(jnp.float32(x), jnp.float32(y))), (1.0,))
    literal = program.jaxpr.outvars[1]
    expected = jax.jit(op)(np.float32(x), np.float32(y))
    if isinstance(literal, Literal):
        assert literal.aval.dtype == expected.dtype and np.asarray(literal.val) == np.asarray(expected)


def test_what_is_rounded_differently_stays():
    def step(n):
        return lax.exp(lax.full((), 0.3)) + n, lax.div(jnp.int32(-7), jnp.int32(2)) + n

    assert "exp" in [eqn.primitive.name for eqn in trace_step(step, (1.0,)).jaxpr.eqns]


def test_known_choice():
    def step(x):
        return lax.select_n(lax.gt(lax.full((), 2.0), 1.0), x, x + 1)

    program = trace_step(step, (np.ones(3, np.float32),))
    assert [eqn.primitive.name for eqn in program.jaxpr.eqns] == ["add"]


def test_what_has_no_result():
    """A callback, whose first operand is a number."""
    program = trace_step(lambda x: (jax.debug.print("{} of {}", 3, x.sum()), x + 1)[1], (np.ones(3, np.float32),))
    assert "debug_print" in "".join(eqn.primitive.name for eqn in program.jaxpr.eqns)
