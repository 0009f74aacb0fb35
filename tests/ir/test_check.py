"""The checker finds programs that are not flat."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar._jax import close_jaxpr, make_jaxpr, open_jaxpr, replace_eqn
from autopar.ir.check import check_program
from autopar.ir.trace.trace import trace_step


@pytest.fixture
def jaxpr():
    def step(x):
        return lax.scan(lambda c, row: (c + row, c.sum()), jnp.sin(x[0]), x)

    return trace_step(step, (np.ones((3, 4), np.float32),)).jaxpr


def rebuilt(jaxpr, eqns):
    return make_jaxpr(jaxpr.invars, jaxpr.outvars, eqns)


def test_good(jaxpr):
    check_program(jaxpr)


def test_defined_twice(jaxpr):
    with pytest.raises(AssertionError, match="defined twice"):
        check_program(rebuilt(jaxpr, [*jaxpr.eqns, jaxpr.eqns[0]]))


def test_used_before_defined(jaxpr):
    with pytest.raises(AssertionError, match="used before it is defined"):
        check_program(rebuilt(jaxpr, jaxpr.eqns[::-1]))


def test_bodies_agree(jaxpr):
    scan = jaxpr.eqns[-1]
    body, _ = open_jaxpr(scan.params["jaxpr"])
    wrong = make_jaxpr(body.invars, body.outvars[::-1], body.eqns)
    eqn = replace_eqn(scan, params={**scan.params, "jaxpr": close_jaxpr(wrong)})
    with pytest.raises(AssertionError, match="scan.*carry"):
        check_program(rebuilt(jaxpr, [*jaxpr.eqns[:-1], eqn]))


def test_typed_keys_and_calls():
    key = jax.make_jaxpr(lambda key: jax.random.split(key))(jax.random.key(0))
    with pytest.raises(AssertionError, match="typed key"):
        check_program(open_jaxpr(key)[0])
    relu = jax.make_jaxpr(jax.nn.relu)(1.0)
    with pytest.raises(AssertionError, match="should have been inlined"):
        check_program(open_jaxpr(relu)[0])


def test_constvars():
    with pytest.raises(AssertionError, match="1 constvars"):
        check_program(open_jaxpr(jax.make_jaxpr(lambda x: x + np.arange(3.0))(1.0))[0])
