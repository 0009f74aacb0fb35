"""Writes to places that are all different: their gradient does not write numbers to find out which was the last."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar._jax import eval_jaxpr, open_jaxpr
from autopar.ir.rewrite.unique_writes import resolve_unique_writes
from autopar.ir.trace.flatten import flatten
from tests.ir.split.cases import primitives_in


def rewritten(fun, *args):
    flat, consts = flatten(*open_jaxpr(jax.make_jaxpr(fun)(*args)))
    made = resolve_unique_writes(flat)
    results = jax.jit(lambda *args: eval_jaxpr(made, (), *args))(*args, *consts)
    for got, want in zip(results, jax.tree.leaves(jax.jit(fun)(*args)), strict=True):
        np.testing.assert_array_equal(got, want)
    return primitives_in(made.eqns)


def put_back(x, key):
    order = jnp.argsort(key)
    return jnp.ones_like(x).at[order].set(jnp.tanh(x[order]))


def gradient_of(fun):
    return jax.value_and_grad(lambda x, key: (fun(x, key) ** 2).sum())


X, KEY = np.float32(np.random.default_rng(0).normal(size=(6, 3))), np.array([2, 0, 1, 1, 0, 2], np.int32)


@pytest.mark.parametrize("dims", [2, 1])
def test_sorted_rows(dims):
    counts = rewritten(gradient_of(put_back), X if dims == 2 else X[:, 0], KEY)
    assert not counts["scatter"] and not counts["eq"]


def test_more_elements_than_32_bits_count():
    """Rows are numbered, not elements."""
    rows = jax.ShapeDtypeStruct((2**20, 2**12), jnp.bfloat16), jax.ShapeDtypeStruct((2**20,), jnp.int32)
    flat, _ = flatten(*open_jaxpr(jax.make_jaxpr(gradient_of(put_back))(*rows)))
    counts = primitives_in(resolve_unique_writes(flat).eqns)
    assert not counts["scatter"] and not counts["eq"]


def test_in_a_loop():
    """What loops have in common stands outside of them."""

    def layers(x, key):
        return lax.scan(lambda x, shift: (put_back(x, key + shift), None), x, jnp.arange(3))[0]

    counts = rewritten(gradient_of(layers), X, KEY)
    assert not counts["scatter"] and not counts["eq"]


def some_places(x, key):
    return jnp.ones_like(x).at[key].set(x)


def half_of_the_order(x, key):
    return jnp.ones_like(x).at[jnp.argsort(key)[:3]].set(x[:3])


def into_more_rows(x, key):
    return jnp.ones((8, 3)).at[jnp.argsort(key)].set(x)


def behind(x, key):
    return jnp.ones_like(x).at[jnp.maximum(jnp.argsort(key), 1)].set(x)


@pytest.mark.parametrize("fun", [some_places, half_of_the_order, into_more_rows, behind])
def test_what_may_be_written_twice_or_not_at_all(fun):
    assert rewritten(gradient_of(fun), X, KEY)["eq"] == 3
