"""Reductions: golden lines, and each device's part against the whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from autopar.ir.rules import rule_for
from tests.ir.rules.harness import FEW, MESH_SHAPES, check_equation, check_function, eqn_of, gradient_of, only_eqn

FLAGS = jnp.arange(32).reshape(4, 8) % 3 > 0
INTEGERS = jnp.arange(32).reshape(4, 8)


@pytest.mark.parametrize(
    "fun, args, rule, linear",
    [
        (lambda x: lax.reduce_sum(x, (1,)), [(4, 8)], "ab->a {sum b}", ((0,),)),
        (lambda x: lax.reduce_sum(x, (0, 2)), [(4, 8, 2)], "abc->b {sum a c}", ((0,),)),
        (lambda x: lax.reduce_sum(x, (1,)), [(4, 1)], "a1->a", ((0,),)),
        (lambda x: lax.reduce_sum(x, (1,)), [INTEGERS], "ab->a {sum b}", ((0,),)),
        (lambda x: lax.reduce_max(x, (1,)), [(4, 8)], "ab->a {max b}", ()),
        (lambda x: lax.reduce_min(x, (0,)), [(4, 8)], "ab->b {min a}", ()),
        (lambda x: lax.reduce_prod(x, (0,)), [(4, 8)], "ab->b {whole a}", ()),
        (lambda x: lax.reduce_or(x, (0,)), [FLAGS], "ab->b {max a}", ()),
        (lambda x: lax.reduce_and(x, (0,)), [FLAGS], "ab->b {min a}", ()),
        (lambda x: lax.reduce_and(x, (0,)), [INTEGERS], "ab->b {whole a}", ()),
        (lambda x: lax.reduce_xor(x, (0,)), [INTEGERS], "ab->b {whole a}", ()),
        (lambda x: lax.argmax(x, 1, jnp.int32), [(4, 8)], "ab->a {whole b}", ()),
        (lambda x: lax.argmin(x, 0, jnp.int32), [(4, 8)], "ab->b {whole a}", ()),
        (lambda x: lax.cumsum(x, 1), [(4, 8)], "ab->ab {whole b}", ((0,),)),
        (lambda x: lax.cumprod(x, 0), [(4, 8)], "ab->ab {whole a}", ()),
        (lambda x: lax.cummax(x, 0), [(4, 1)], "a1->a1 {whole a}", ()),
        (lambda x: lax.cumlogsumexp(x, 1, reverse=True), [(4, 8)], "ab->ab {whole b}", ()),
    ],
)
def test_rule(fun, args, rule, linear):
    found = rule_for(only_eqn(fun, *args))
    assert (str(found), found.linear) == (rule, linear)


def _two_reductions(x):
    return lax.reduce((x, x), (0.0, 1.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (1,))


def test_reduction_by_any_computation():
    eqn = eqn_of("reduce", _two_reductions, (8, 3))
    assert str(rule_for(eqn)) == "ab,ab,,->a,a {whole b}"
    assert check_equation(eqn, mesh_shape=(2, 2, 2)) == 8


REDUCTIONS = {
    "sum": lambda x, d: lax.reduce_sum(x, (d,)),
    "sum of integers": lambda x, d: lax.reduce_sum(x.astype(jnp.int32), (d,)),
    "max": lambda x, d: lax.reduce_max(x, (d,)),
    "min": lambda x, d: lax.reduce_min(x, (d,)),
    "prod": lambda x, d: lax.reduce_prod(x, (d,)),
    "or": lambda x, d: lax.reduce_or(x > 1, (d,)),
    "and": lambda x, d: lax.reduce_and(x > -1, (d,)),
    "bits": lambda x, d: lax.reduce_or(x.astype(jnp.int32), (d,)),
    "xor": lambda x, d: lax.reduce_xor(x.astype(jnp.int32), (d,)),
    "argmax": lambda x, d: lax.argmax(x, d, jnp.int32),
    "argmin": lambda x, d: lax.argmin(x, d, jnp.int32),
    "cumsum": lax.cumsum,
    "cumprod": lax.cumprod,
    "cummax": lax.cummax,
    "cumlogsumexp": lax.cumlogsumexp,
}
OWN = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_or", "reduce_and", "reduce_xor", "argmax"}
OWN |= {"argmin", "cumsum", "cumprod", "cummax", "cumlogsumexp"}


@FEW
@given(
    st.lists(st.sampled_from([1, 3, 4, 8]), min_size=2, max_size=3).map(tuple),
    st.lists(st.sampled_from(sorted(REDUCTIONS)), min_size=4, max_size=4, unique=True),
    st.sampled_from(MESH_SHAPES),
    st.integers(0, 99),
)
def test_each_device_computes_its_part(shape, names, mesh_shape, seed):
    dim = seed % len(shape)
    fun = lambda x: [REDUCTIONS[name](x, dim) for name in names]  # noqa: E731
    assert check_function(fun, shape, seed=seed, mesh_shape=mesh_shape, only=OWN, limit=5) >= len(names)


def test_gradients():
    """Softmax, variance, and cumulative sums backward."""

    def fun(x):
        return jax.nn.softmax(x) * x.var(0) + lax.cumsum(x, 1) + jax.nn.logsumexp(x, 1, keepdims=True)

    assert check_function(gradient_of(fun), (8, 4), only=OWN, limit=6) > 20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e5m2"])
def test_what_is_no_number_is_not_lost(dtype):
    """NaN in one part and not in another, infinities, zeros with a sign."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), dtype)
    x = x.at[0, 3].set(jnp.nan).at[1, 5].set(-jnp.nan).at[2, 0].set(jnp.inf).at[3].set(-jnp.inf).at[4].set(-0.0)
    x = x.at[5, 1].set(jnp.nan).at[5, 2].set(-jnp.inf).at[6].set(-0.0).at[6, 7].set(0.0)

    def fun(x):
        window = lax.reduce_window(x, -jnp.inf, lax.max, (1, 8), (1, 1), "valid")
        return x.max(), x.min(), x.max(1), x.min(1), x.max(0), jnp.abs(x).max(1), window

    for mesh_shape in ((8,), (2, 4)):
        only = {"reduce_max", "reduce_min", "reduce_window_max"}
        assert check_function(fun, x, mesh_shape=mesh_shape, only=only, limit=6) > 6
