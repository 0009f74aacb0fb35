"""JAX's kernels for products of rows in groups are one operation, with the rule of `ragged_dot`."""

from __future__ import annotations

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas.ops.tpu import megablox

from autopar.ir.rules import rule_for
from autopar.ir.rules.grouped_product import COLUMNS_OF_GROUPS, ROWS_OF_GROUPS, grouped_product_p
from tests.ir.rules.harness import check_function, eqn_of, flat_eqns, gradient_of
from tests.ir.split.cases import primitives_in

backend = importlib.import_module(
    "jax.experimental.pallas.ops.tpu.megablox.gmm"
)  # the package has a function of that name
SIZES = np.array([3, 0, 9, 4], np.int32)
SETTINGS = {"preferred_element_type": jnp.float32, "tiling": (8, 8, 8), "interpret": True}
OVER_ROWS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
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


@pytest.mark.parametrize("offset", [None, 1])
@pytest.mark.parametrize("again", [lambda layer: layer, jax.checkpoint])
def test_in_a_loop_that_is_differentiated(again, offset):
    """JAX makes what is the same in every turn before the loop: told so, a kernel is the same product. Of other groups than
    all it is none."""

    def loss(x, weights):
        def layer(x, weights):
            sizes = jnp.bincount((x.sum(1) > 0).astype(int), length=2).astype(jnp.int32)
            first = None if offset is None else jnp.int32(offset)
            made = megablox.gmm(x, weights, sizes, jnp.float32, (8, 8, 8), group_offset=first, interpret=True)
            return jnp.tanh(made), None

        return lax.scan(again(layer), x, weights)[0]

    gradient = jax.grad(lambda *args: loss(*args).sum(), (0, 1))
    count = primitives_in(flat_eqns(gradient, (16, 8), (3, 2, 8, 8)))
    again_too = again is jax.checkpoint
    assert (count["pallas_call"], count["grouped_product"]) == (
        (0, 3 + again_too) if offset is None else (3 + again_too, 0)
    )


IN_PARTS = np.array([[3, 0, 4, 1], [0, 0, 8, 0], [2, 2, 2, 0], [1, 2, 3, 2]], np.int32)


@pytest.mark.parametrize(
    "numbers, shapes, rule",
    [
        (ROWS_OF_GROUPS, [(32, 16), (4, 16, 8)], "(p0a)b,g0bd,p0h0->(p0a)d {sum b g0, whole a h0}"),
        (COLUMNS_OF_GROUPS, [(32, 16), (4, 8, 16)], "(p0a)b,g0db,p0h0->(p0a)d {sum b g0, whole a h0}"),
        (OVER_ROWS, [(32, 16), (32, 8)], "(p0a)b,(p0a)c,p0h0->g0bc {sum a p0, whole a h0}"),
    ],
)
def test_rows_in_parts(numbers, shapes, rule):
    """Each part of the rows has its own groups: parts split, and groups do; a row that is of none is zeros."""

    def product(lhs, rhs):
        settings = {"preferred_element_type": jnp.float32, "precision": None, "tiles": None}
        return grouped_product_p.bind(lhs, rhs, IN_PARTS, ragged_dot_dimension_numbers=numbers, **settings)

    assert str(rule_for(eqn_of("grouped_product", product, *shapes))) == rule
    assert check_function(product, *shapes, only=["grouped_product"], limit=12) > 6
    each = [
        lax.ragged_dot_general(lhs, rhs, sizes, numbers)
        for lhs, rhs, sizes in zip(
            np.split(np.ones(shapes[0], np.float32), 4),
            np.split(np.ones(shapes[1], np.float32), 4)
            if numbers is OVER_ROWS
            else [np.ones(shapes[1], np.float32)] * 4,
            IN_PARTS,
            strict=True,
        )
    ]
    expected = sum(each) if numbers is OVER_ROWS else jnp.concatenate(each)
    np.testing.assert_allclose(product(*map(jnp.ones, shapes)), expected)


@pytest.mark.parametrize("numbers, shapes", [(ROWS_OF_GROUPS, [(48, 8), (4, 8, 4)]), (OVER_ROWS, [(48, 8), (48, 4)])])
@pytest.mark.parametrize("mesh_shape", [(2, 4), (2, 2, 2)])
def test_rows_travel_to_their_groups(numbers, shapes, mesh_shape):
    """Over one axis or two, in several parts on a device, with rows split over another axis; some rows are of no group."""

    def product(lhs, rhs):
        settings = {"preferred_element_type": jnp.float32, "precision": None, "tiles": None}
        return grouped_product_p.bind(lhs, rhs, EIGHT_PARTS, ragged_dot_dimension_numbers=numbers, **settings)

    def travels(strategy):
        return strategy.exchanged_over and "b" not in strategy.axes_of

    assert check_function(product, *shapes, only=["grouped_product"], limit=8, which=travels, mesh_shape=mesh_shape) > 3


EIGHT_PARTS = np.array(
    [[3, 0, 2, 1], [0, 0, 6, 0], [2, 2, 2, 0], [1, 2, 3, 0], [0, 0, 0, 5], [1, 1, 1, 1], [6, 0, 0, 0], [0, 0, 1, 2]],
    np.int32,
)
