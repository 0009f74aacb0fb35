"""What XLA takes for products of rows in groups, rows that travel, and pooling, besides operands and results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar import Link, LogicalMesh
from autopar.intra_op.strategies import enumerate_strategies
from autopar.intra_op.workspace import workspace_bytes
from autopar.ir.rules import rule_for
from autopar.ir.rules.grouped_product import GROUPS_OF_ROWS, ROWS_OF_GROUPS, Tiles, grouped_product_p
from tests.ir.rules.harness import eqn_of

MESH = LogicalMesh((4,), links=(Link(0.0, 1e9),))
ROWS, DEPTH, COLUMNS, GROUPS = 64, 8, 16, 8
SIZES = jnp.ones((8, GROUPS), jnp.int32)
LHS, RHS = 4 * ROWS * DEPTH, 4 * ROWS * COLUMNS


def of_rows(tiles=None):
    def product(lhs, rhs):
        return grouped_product_p.bind(
            lhs,
            rhs,
            SIZES,
            ragged_dot_dimension_numbers=ROWS_OF_GROUPS,
            preferred_element_type=jnp.float32,
            precision=None,
            tiles=tiles,
        )

    return eqn_of("grouped_product", product, (ROWS, DEPTH), (GROUPS, DEPTH, COLUMNS))


def of_groups():
    def product(lhs, rhs):
        return lax.ragged_dot_general(lhs, rhs, SIZES[0], GROUPS_OF_ROWS)

    return eqn_of("ragged_dot_general", product, (DEPTH, ROWS), (ROWS, COLUMNS))


def of_pooling(dtype):
    """The gradient of max pooling: 4 images of 8 x 8, windows of 2 x 2."""

    def pool(x):
        window = (1, 2, 2, 1)
        return jnp.sum(lax.reduce_window(x.astype(dtype), -jnp.inf, lax.max, window, window, "VALID") ** 2)

    return eqn_of("select_and_scatter_add", jax.grad(pool), (4, 8, 8, 3))


@pytest.mark.parametrize(
    "eqn, choice, num_bytes",
    [
        (of_rows(), "-", LHS * GROUPS // 8),  # one part of the rows after the other
        (of_rows(), "p0", LHS // 4 * GROUPS // 2),  # of two parts
        (of_rows(), "g0", LHS * (GROUPS // 4) // 8),
        (of_rows(), "p0>g0", LHS * (GROUPS // 4) + LHS + RHS),  # all rows of its groups at once, and room for them
        (of_groups(), "b", (LHS + RHS) // 4 * GROUPS),
        (of_rows(Tiles((8, 8, 8), True)), "-", 0),
        (of_pooling(jnp.float32), "-", 4 * 4 * 4 * 3 * (4 * 4 + 4)),
        (of_pooling(jnp.bfloat16), "-", 4 * 4 * 4 * 3 * (4 * 4 + 4)),
        (of_pooling(jnp.float32), "a", 4 * 4 * 3 * (4 * 4 + 4)),  # an image on each device
    ],
)
def test_bytes(eqn, choice, num_bytes):
    rule = rule_for(eqn)
    (strategy,) = [s for s in enumerate_strategies(rule, {"x": 4}) if str(s) == choice]
    assert workspace_bytes(rule, eqn, strategy, MESH) == num_bytes


@pytest.mark.parametrize("eqn", [of_rows(), of_pooling(jnp.float32)])
def test_tpus_have_kernels(eqn):
    mesh = LogicalMesh((4,), links=(Link(0.0, 1e9, torus=((4, 1e9),)),))
    rule = rule_for(eqn)
    strategy = enumerate_strategies(rule, {"x": 4})[-1]
    assert workspace_bytes(rule, eqn, strategy, mesh) == 0
