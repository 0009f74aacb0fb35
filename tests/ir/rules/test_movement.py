"""Rules of operations that move elements: golden lines, and every strategy against the operation itself."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from autopar.ir.rules import rule_for
from tests.ir.rules.harness import FEW, MESH_SHAPES, check_equation, check_function, flat_eqns, gradient_of, only_eqn


@pytest.mark.parametrize(
    "fun, shapes, rule",
    [
        (lambda x: jnp.broadcast_to(x, (8, 4)), [(4,)], "b->ab"),
        (lambda x: lax.broadcast_in_dim(x, (8, 4), (0, 1)), [(1, 4)], "1b->ab"),
        (lambda x: x.transpose(1, 0, 2), [(2, 3, 4)], "abc->bac"),
        (lambda x: lax.squeeze(x, (1,)), [(4, 1, 8)], "a1b->ab"),
        (lambda p, x, y: lax.select_n(p, x, y), [jnp.zeros((4, 8), bool), (4, 8), (4, 8)], "ab,ab,ab->ab"),
        (lambda p, x, y: lax.select_n(p, x, y), [jnp.zeros((), bool), (4, 8), (4, 8)], ",ab,ab->ab"),
        (lambda x: lax.slice(x, (0, 1), (4, 7)), [(4, 8)], "ab->ac {whole b c}"),
        (lambda x: lax.slice(x, (0, 1), (197, 197)), [(197, 197)], "ab->ac {whole b c}"),
        (lambda x, y: lax.concatenate([x, y], 1), [(4, 8), (4, 3)], "ab,ac->ad {whole b c d}"),
        (lambda x: lax.split(x, (2, 6), 1), [(4, 8)], "ab->ac,ad {whole b c d}"),
        (lambda x, y: lax.pad(x, y, ((0, 0, 0), (1, 2, 0))), [(4, 8), ()], "ab,->ac {whole b c}"),
        (lambda x: lax.rev(x, (1,)), [(4, 8)], "ab->ab {whole b}"),
        (lambda x: lax.tile(x, (2, 1, 3)), [(4, 8, 1)], "bc1->(ab)cd"),
        (lambda: lax.broadcasted_iota("int32", (4, 8), 1), [], "->ab"),
        (lambda x: lax.bitcast_convert_type(x, jnp.uint16), [(4, 8)], "ab->abc {whole c}"),
        (lambda x: lax.bitcast_convert_type(x, jnp.int32), [(4, 8)], "ab->ab"),
    ],
)
def test_golden(fun, shapes, rule):
    assert str(rule_for(only_eqn(fun, *shapes))) == rule


def test_random_bits_count_from_where_their_part_begins():
    eqns = flat_eqns(lambda key: jax.random.bits(jax.random.wrap_key_data(key), (8, 6)), jnp.zeros(2, jnp.uint32))
    counters = [eqn for eqn in eqns if eqn.primitive.name == "iota_2x32_shape"]
    assert [str(rule_for(eqn)) for eqn in counters] == ["->ab,ab"]
    for mesh_shape in MESH_SHAPES:
        check_equation(counters[0], mesh_shape=mesh_shape)


def move(x, y):
    """Something of everything."""
    z = jnp.concatenate([x, 2 * y], axis=1)
    z = jnp.where(z > 0, z, jnp.pad(y, ((0, 0), (0, y.shape[1]))))
    head, tail = jnp.split(z, 2, axis=1)
    turned = jnp.flip(head, 1) + tail.T[::-1].T[:, ::1]
    return turned[:, 1:-1:2] + jnp.tile(turned.mean(1, keepdims=True), (1, 1)), jnp.stack([x, y], 1)[:, 0], x[..., None]


@settings(FEW, max_examples=3)
@given(st.sampled_from(MESH_SHAPES), st.integers(0, 2**16), st.sampled_from([(8, 8), (4, 6), (3, 16), (8, 5)]))
def test_against_the_operation(mesh_shape, seed, shape):
    assert check_function(gradient_of(move), shape, shape, seed=seed, mesh_shape=mesh_shape, limit=4) > 20


@pytest.mark.parametrize("mesh_shape", MESH_SHAPES)
@pytest.mark.parametrize(
    "fun, args",
    [
        (lambda x: lax.tile(x, (2, 8)), [(8, 3)]),
        (lambda x: jnp.broadcast_to(x[:, None, :], (8, 4, 16)), [(8, 16)]),
        (lambda x: lax.bitcast_convert_type(x, jnp.uint8), [(8, 4)]),
        (lambda: lax.broadcasted_iota("uint8", (8, 8), 0), []),
        (lambda x: lax.pad(x, jnp.float32(1), ((0, 0, 0), (-1, 2, 1))), [(8, 6)]),
    ],
)
def test_more(fun, args, mesh_shape):
    assert check_function(fun, *args, mesh_shape=mesh_shape) > 0
