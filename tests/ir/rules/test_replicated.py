"""The lists of primitives that no rule splits."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import pytest

from autopar.errors import UnsupportedPrimitiveError
from autopar.ir.rules import rule_for
from autopar.ir.rules.replicated import ALL_LISTS, SIDE_EFFECTS, list_of
from tests.ir.rules.harness import eqn_of


def test_no_primitive_stands_in_two_lists():
    names = [name for listed in ALL_LISTS.values() for name in listed]
    assert sorted(set(names)) == sorted(names)


def test_list_of():
    assert list_of("scan") == "STRUCTURED"
    assert list_of("ppermute") == list_of("ppermute_start") == list_of("psum_done") == "COLLECTIVE"
    assert list_of("exp") is None


def test_computed_whole_without_a_warning():
    def fun(x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    eqn = eqn_of("pure_callback", fun, (4, 8))
    assert eqn.primitive.name in SIDE_EFFECTS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rule = rule_for(eqn)
    assert str(rule) == "ab->cd {whole a b c d}"
    assert rule.splittable() == ()


def test_a_collective_in_a_program_for_one_device():
    eqn = jax.make_jaxpr(lambda x: jax.lax.psum(x, "i"), axis_env=[("i", 2)])(jnp.ones(4)).eqns[0]
    with pytest.raises(UnsupportedPrimitiveError, match="one device"):
        rule_for(eqn)
