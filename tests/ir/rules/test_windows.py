"""Windowed reductions: golden lines, and each device's part against the whole, gradients included."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from autopar.ir.rules import rule_for
from autopar.ir.rules.rule import factor_names
from autopar.ir.rules.windows import Window
from tests.ir.rules.harness import FEW, MESH_SHAPES, check_function, flat_eqns, gradient_of

OWN = {"reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"}
OWN |= {"select_and_gather_add", "select_and_scatter", "select_and_scatter_add"}


def pool(window, strides, padding="VALID", init=-jnp.inf, by=lax.max, **params):
    return lambda x: lax.reduce_window(x, init, by, window, strides, padding, **params)


def rules_of(fun, *args):
    return [str(rule_for(eqn)) for eqn in flat_eqns(fun, *args) if eqn.primitive.name in OWN]


@pytest.mark.parametrize(
    "fun, shape, rule",
    [
        (pool((1, 2, 3), (1, 2, 3)), (4, 8, 9), "a(bc)(de)->abd {whole c e}"),
        (pool((1, 3), (1, 2), "SAME"), (4, 8), "ab->ad {whole b d}"),
        (pool((1, 8), (1, 1)), (4, 8), "ab->a1 {max b}"),
        (pool((1, 8), (1, 8), init=0.0, by=lax.add), (4, 8), "ab->a1 {sum b}"),
        (pool((1, 8), (1, 8), init=jnp.inf, by=lax.min), (4, 8), "ab->a1 {min b}"),
        (pool((1, 4), (1, 1), init=0.0, by=lax.add, window_dilation=(1, 2)), (4, 8), "a(bc)->ac {sum b, whole c}"),
        (pool((1, 2), (1, 2), init=0.0, by=lambda x, y: x + 2 * y), (4, 8), "a(bc),->ab {whole c}"),
        (jax.grad(lambda x: pool((1, 2), (1, 2))(x).sum()), (4, 8), "ab,a(bc)->a(bc) {whole c}"),
    ],
)
def test_rule(fun, shape, rule):
    assert rules_of(fun, shape) == [rule]


@pytest.mark.parametrize(
    "size, stride, padding, base, dilation", list(itertools.product([1, 2, 4], [1, 2], [0, 1], [1, 2], [1, 2]))
)
def test_factors_fit_the_lengths(size, stride, padding, base, dilation):
    """In every case the factors of a dim multiply to its length."""
    for length in (1, 2, 4, 8):
        spread = (length - 1) * base + 1 + 2 * padding
        places = (spread - (size - 1) * dilation - 1) // stride + 1
        if places < 1:
            continue
        dims = Window(length, places, size, stride, (padding, padding), base, dilation).factors(factor_names())
        for dim, expected in ((dims.operand, length), (dims.window, size), (dims.result, places)):
            assert np.prod([dims.sizes[factor] for factor in dim], dtype=int) == expected


@FEW
@given(
    st.tuples(st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 2, 4])),
    st.tuples(st.sampled_from([1, 2]), st.sampled_from([1, 2, 4])),
    st.sampled_from(["SAME", "VALID"]),
    st.sampled_from([(-jnp.inf, lax.max), (jnp.inf, lax.min), (0.0, lax.add)]),
    st.sampled_from(MESH_SHAPES),
    st.integers(0, 99),
)
def test_each_device_computes_its_part(window, strides, padding, kind, mesh_shape, seed):
    """Forward and gradient; dims of length 8, the first without a window."""
    init, by = kind
    fun = pool((1, *window), (1, *strides), padding, init, by)
    check_function(gradient_of(fun), (8, 8, 8), only=OWN, mesh_shape=mesh_shape, seed=seed, limit=5)


def test_tangents_of_max_pooling():
    def fun(x, tangent):
        return jax.jvp(pool((1, 2), (1, 2)), (x,), (tangent,))

    assert rules_of(fun, (8, 8), (8, 8))[-1] == "a(bc),a(bc)->ab {whole c}"
    assert check_function(fun, (8, 8), (8, 8), only=OWN) > 10


def test_any_computation():
    fun = pool((1, 2, 8), (1, 2, 1), init=0.0, by=lambda x, y: x + 2 * y)
    assert check_function(fun, (8, 8, 8), only=OWN, mesh_shape=(2, 2, 2), limit=20) > 10


def test_window_over_a_split_dim_shrinks():
    """A window over everything, and one whose steps are split: the local window is shorter."""
    whole = pool((1, 8), (1, 1), init=0.0, by=lax.add)
    steps = pool((1, 8), (1, 1), init=0.0, by=lax.add, window_dilation=(1, 2))
    assert check_function(whole, (2, 8), only=OWN, mesh_shape=(2, 2, 2), limit=99) > 10
    assert check_function(steps, (2, 16), only=OWN, mesh_shape=(2, 2, 2), limit=99) > 10
