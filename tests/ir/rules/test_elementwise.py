"""Elementwise rules: golden lines, what carries partial sums, and each device's part against the whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from autopar._jax import find_primitives
from autopar.ir.rules import rule_for
from tests.ir.rules.harness import FEW, MESH_SHAPES, check_equation, check_function, flat_eqns, gradient_of, only_eqn

BFLOAT16 = jnp.ones((4, 8), jnp.bfloat16)
INTEGERS = jnp.ones((4, 8), jnp.int32)
BYTES = jnp.ones((4, 8), jnp.uint8)
FLAGS = jnp.ones((4, 8), bool)
COMPLEX = jnp.ones((4, 8), jnp.complex64)


@pytest.mark.parametrize(
    "fun, args, rule, linear",
    [
        (lax.exp, [(4, 8)], "ab->ab", ()),
        (lax.exp, [(4, 1)], "a1->a1", ()),
        (lax.mul, [(4, 8), (4, 8)], "ab,ab->ab", ((0,), (1,))),
        (lax.mul, [INTEGERS, INTEGERS], "ab,ab->ab", ((0,), (1,))),
        (lambda x: x * 2.0, [(4, 8)], "ab,->ab", ((0,),)),
        (lax.add, [(4, 8), (4, 8)], "ab,ab->ab", ((0, 1),)),
        (lax.sub, [(4, 8), (4, 8)], "ab,ab->ab", ((0, 1),)),
        (lax.div, [(4, 8), (4, 8)], "ab,ab->ab", ((0,),)),
        (lax.div, [INTEGERS, INTEGERS], "ab,ab->ab", ()),
        (lax.neg, [(4, 8)], "ab->ab", ((0,),)),
        (lax.max, [(4, 8), (4, 8)], "ab,ab->ab", ()),
        (lax.gt, [(4, 8), (4, 8)], "ab,ab->ab", ()),
        (lax.bitwise_and, [FLAGS, FLAGS], "ab,ab->ab", ()),
        (lambda x: lax.clamp(0.0, x, 1.0), [(4, 8)], ",ab,->ab", ()),
        (lax.complex, [(4, 8), (4, 8)], "ab,ab->ab", ((0, 1),)),
        (lax.real, [COMPLEX], "ab->ab", ((0,),)),
        (lambda x: lax.integer_pow(x, 3), [(4, 8)], "ab->ab", ()),
        (lax.is_finite, [(4, 8)], "ab->ab", ()),
        (lambda x: x.astype(jnp.bfloat16), [(4, 8)], "ab->ab", ()),
        (lambda x: x.astype(jnp.float32), [BFLOAT16], "ab->ab", ((0,),)),
        (lambda x: x.astype(jnp.float16), [BFLOAT16], "ab->ab", ()),
        (lambda x: x.astype(jnp.bfloat16), [BFLOAT16.astype(jnp.float16)], "ab->ab", ()),
        (lambda x: x.astype(jnp.complex64), [BFLOAT16], "ab->ab", ((0,),)),
        (lambda x: x.astype(jnp.bfloat16), [INTEGERS], "ab->ab", ()),
        (lambda x: x.astype(jnp.float8_e4m3fn), [(4, 8)], "ab->ab", ()),
        (lambda x: x.astype(jnp.int32), [(4, 8)], "ab->ab", ()),
        (lambda x: x.astype(jnp.float32), [INTEGERS], "ab->ab", ((0,),)),
        (lambda x: x.astype(jnp.float32), [BYTES], "ab->ab", ()),
        (lambda x: x.astype(jnp.uint8), [INTEGERS], "ab->ab", ((0,),)),
        (lambda x: x.astype(jnp.int32), [BYTES], "ab->ab", ()),
        (lambda x: x.astype(jnp.float32), [FLAGS], "ab->ab", ()),
        (lambda x: jax.device_put(x, jax.memory.Space.Host), [(4, 8)], "ab->ab", ((0,),)),
    ],
)
def test_rule(fun, args, rule, linear):
    found = rule_for(only_eqn(fun, *args))
    assert (str(found), found.linear) == (rule, linear)


def test_a_dim_of_length_one_meets_a_longer_one():
    eqn = only_eqn(lambda x, y: find_primitives("mul")[0].bind(x, y), (8, 16), (8, 1))
    assert str(rule_for(eqn)) == "ab,a1->ab"
    for mesh_shape in MESH_SHAPES:
        assert check_equation(eqn, mesh_shape=mesh_shape) >= 4


def test_counters_of_random_bits_have_two_results():
    eqns = [e for e in flat_eqns(lambda k: jax.random.bits(k, (8, 4)), jax.random.key(0))]
    (eqn,) = [e for e in eqns if e.primitive.name == "threefry2x32"]
    assert str(rule_for(eqn)) == ",,ab,ab->ab,ab"
    assert check_equation(eqn, limit=30) > 5


UNARY = [
    *(lax.abs, lax.acos, lax.asinh, lax.atan, lax.bessel_i0e, lax.cbrt, lax.ceil, lax.cos, lax.digamma, lax.erf),
    *(lax.erf_inv, lax.exp, lax.exp2, lax.expm1, lax.is_finite, lax.lgamma, lax.log, lax.log1p, lax.logistic, lax.neg),
    *(lax.round, lax.rsqrt, lax.sign, lax.sin, lax.sqrt, lax.square, lax.tan, lax.tanh, lax.stop_gradient),
    lambda x: lax.integer_pow(x, -2),
    lambda x: lax.reduce_precision(x, 8, 7),
    lambda x: lax.population_count(lax.bitcast_convert_type(x, jnp.uint32)),
    lambda x: jax.ad_checkpoint.checkpoint_name(x, "x"),
]
BINARY = [
    *(lax.add, lax.sub, lax.mul, lax.div, lax.max, lax.min, lax.pow, lax.atan2, lax.nextafter, lax.rem, lax.complex),
    *(lax.eq, lax.lt, lax.ge, lax.igamma, lax.zeta),
]


@FEW
@given(st.data(), st.sampled_from(MESH_SHAPES), st.integers(0, 99))
def test_each_device_computes_its_part(data, mesh_shape, seed):
    """Eight operations drawn together, on drawn shapes."""
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 8, 16]), min_size=1, max_size=3)))
    unary = data.draw(st.lists(st.sampled_from(UNARY), min_size=4, max_size=4))
    binary = data.draw(st.lists(st.sampled_from(BINARY), min_size=4, max_size=4))
    rng = np.random.default_rng(seed)
    x, y = (jnp.asarray(rng.uniform(0.1, 0.9, shape), jnp.float32) for _ in range(2))
    skipped = {"bitcast_convert_type"}  # another family's
    names = {e.primitive.name for f in unary for e in flat_eqns(f, x)}
    names |= {e.primitive.name for f in binary for e in flat_eqns(f, x, y)}
    both = lambda x, y: ([f(x) for f in unary], [f(x, y) for f in binary])  # noqa: E731
    check_function(both, x, y, seed=seed, mesh_shape=mesh_shape, only=names - skipped, limit=4)


TARGETS = [jnp.bfloat16, jnp.float32, jnp.int32, jnp.uint8]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8, jnp.complex64])
def test_partial_sums_pass_where_the_dtype_lets_them(dtype):
    """Every target dtype of a conversion, and the ring operations."""
    x, y = jnp.ones((2, 8), dtype), jnp.full((2, 8), 2, dtype)
    targets = [jnp.complex64] if dtype == jnp.complex64 else [*TARGETS, jnp.complex64]

    def fun(x, y):
        return [x.astype(target) for target in targets], x + y, x - y, x * y, -x

    assert check_function(fun, x, y, mesh_shape=(2, 4), limit=20) > 20


def test_gradients():
    def fun(x, y):
        return jax.nn.gelu(x) * jnp.log1p(jnp.exp(y)) + jnp.tanh(x / (1 + y * y)) ** 3

    own = {"add", "add_any", "mul", "div", "sub", "neg", "tanh", "exp", "log1p", "logistic", "integer_pow", "max"}
    assert check_function(gradient_of(fun), (8, 4), (8, 4), only=own, limit=3) > 30
