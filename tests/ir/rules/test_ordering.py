"""Rules of operations that put elements in order: golden lines, and every strategy against the operation itself."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from autopar.ir.rules import rule_for
from tests.ir.rules.harness import FEW, MESH_SHAPES, check_function, eqn_of, gradient_of


@pytest.mark.parametrize(
    "primitive, fun, args, rule",
    [
        ("sort", lambda x: lax.sort(x, dimension=1), [(4, 8)], "ab->ab {whole b}"),
        ("sort", lambda x: lax.sort(x, dimension=0), [(4, 8)], "ab->ab {whole a}"),
        ("sort", lambda x, y: lax.sort((x, y), dimension=1, num_keys=2), [(4, 8), (4, 8)], "ab,ab->ab,ab {whole b}"),
        ("sort", lambda x: jnp.argsort(x, axis=-1), [(2, 4, 8)], "abc,abc->abc,abc {whole c}"),
        ("top_k", lambda x: lax.top_k(x, 3), [(4, 8)], "ab->ac,ac {whole b c}"),
        ("top_k", lambda x: lax.top_k(x, 1), [(4, 8)], "ab->a1,a1 {whole b}"),
        ("top_k", lambda x: lax.top_k(x, 5), [(2, 3, 7)], "abc->abd,abd {whole c d}"),
        ("approx_top_k", lambda x: lax.approx_max_k(x, 2), [(4, 8)], "ab->ac,ac {whole b c}"),
    ],
)
def test_golden(primitive, fun, args, rule):
    assert str(rule_for(eqn_of(primitive, fun, *args))) == rule


def order(x):
    """The best of each row, all in order, and where they were."""
    best, places = lax.top_k(x, 3)
    ordered = jnp.sort(x, axis=0)
    return best, places, ordered, jnp.argsort(-x, axis=1), jnp.median(x, axis=1)


@FEW
@given(st.sampled_from(MESH_SHAPES), st.integers(0, 2**16), st.sampled_from([(8, 8), (16, 5), (6, 8), (3, 16)]))
def test_against_the_operation(mesh_shape, seed, shape):
    assert check_function(order, shape, seed=seed, mesh_shape=mesh_shape, limit=4) > 5


@settings(FEW, max_examples=3)
@given(st.sampled_from(MESH_SHAPES), st.integers(0, 2**16), st.sampled_from([(8, 8), (4, 6)]))
def test_gradients(mesh_shape, seed, shape):
    def scores(x):
        return lax.top_k(x, 2)[0], jnp.sort(x, axis=1), jnp.sort(x, axis=0, descending=True)

    assert check_function(gradient_of(scores), shape, seed=seed, mesh_shape=mesh_shape, limit=3) > 5


@pytest.mark.parametrize("mesh_shape", MESH_SHAPES)
def test_ties_are_broken_as_on_one_device(mesh_shape):
    tied = jnp.asarray(jax.random.randint(jax.random.key(0), (8, 8), 0, 3), jnp.float32)
    assert (
        check_function(
            lambda x: (lax.top_k(x, 4), lax.sort(x), jnp.argsort(x, stable=True)), tied, mesh_shape=mesh_shape
        )
        > 0
    )
