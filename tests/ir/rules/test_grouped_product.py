"""JAX's kernels for products of rows in groups are one operation, with the rule of `ragged_dot`."""

from __future__ import annotations

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import megablox

from autopar.ir.rules import rule_for
from tests.ir.rules.harness import check_function, eqn_of, flat_eqns, gradient_of

backend = importlib.import_module(
    "jax.experimental.pallas.ops.tpu.megablox.gmm"
)  # the package has a function of that name
SIZES = np.array([3, 0, 9, 4], np.int32)
SETTINGS = {"preferred_element_type": jnp.float32, "tiling": (8, 8, 8), "interpret": True}
multiply = functools.partial(megablox.gmm, **SETTINGS)


def names(fun, *args):
    return [eqn.primitive.name for eqn in flat_eqns(fun, *args)]


def test_rules():
    """Forward, and by rows and by weights; what says which tiles are of which group is gone."""
    fun = gradient_of(lambda x, w: multiply(x, w, SIZES))
    products = [eqn for eqn in flat_eqns(fun, (16, 16), (4, 16, 8)) if eqn.primitive.name == "grouped_product"]
    rules = [str(rule_for(eqn)) for eqn in products]
    assert rules == [
        "ab,g0bd,h0->ad {sum b g0, whole h0}",
        "ab,g0db,h0->ad {sum b g0, whole h0}",
        "ab,bc,h0->g0ac {sum b, whole h0}",
    ]
    assert {rule_for(eqn).flops for eqn in products} == {2 * 16 * 16 * 8}
    assert "pallas_call" not in names(fun, (16, 16), (4, 16, 8))


def test_on_parts():
    """Of rows, of groups, of columns and of the depth; tiles are longer than some parts."""
    fun = gradient_of(lambda x, w: multiply(x, w, SIZES))
    assert check_function(fun, (16, 16), (4, 16, 8), only=["grouped_product"], limit=2) == 6


def twice(lhs, rhs, sizes):
    return 2 * backend.gmm.__wrapped__(lhs, rhs, sizes, **SETTINGS)


def test_another_function_is_not_taken_for_it():
    twice.__name__ = "gmm"
    assert "pallas_call" in names(jax.jit(twice), (16, 16), (4, 16, 8), SIZES)
    part = functools.partial(backend.gmm, **SETTINGS, group_offset=jnp.int32(1))
    assert "pallas_call" in names(part, (16, 16), (2, 16, 8), SIZES)
    assert eqn_of("grouped_product", functools.partial(backend.gmm, **SETTINGS), (16, 16), (4, 16, 8), SIZES)
