"""The kernel that an operation is priced as: what is multiplied, and the products of rows in groups."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct, lax

from autopar import Cluster, Link, LogicalMesh
from autopar.cost.kernels import Product, kernel_seconds
from autopar.intra_op.build_graph import build_graph
from autopar.intra_op.kernels import kernel_of
from autopar.intra_op.traffic import find_traffic
from autopar.ir.rules.grouped_product import COLUMNS_OF_GROUPS, GROUPS_OF_ROWS, ROWS_OF_GROUPS
from autopar.ir.trace.trace import trace_step

GPUS = LogicalMesh((1,), links=(Link(0.0, 1e9),))
TPUS = LogicalMesh((1,), links=(Link(0.0, 1e9, torus=((1, 1e9),)),))
ROWS, DEPTH, COLUMNS, GROUPS = 512, 32, 48, 8


def kernel_of_groups(numbers, lhs, rhs, mesh):
    """The kernel of a grouped product of bfloat16 arrays."""
    types = ShapeDtypeStruct(lhs, jnp.bfloat16), ShapeDtypeStruct(rhs, jnp.bfloat16)

    def product(lhs, rhs, lengths):
        return lax.ragged_dot_general(lhs, rhs, lengths, numbers)

    program = trace_step(product, (*types, ShapeDtypeStruct((GROUPS,), jnp.int32)))
    graph = build_graph(program.jaxpr, mesh, {})
    (node,) = [node for node in graph.nodes if node.name == "ragged_dot_general"]
    return kernel_of(node, node.strategies[0], find_traffic(graph)[node.index], mesh)


@pytest.mark.parametrize(
    "numbers, lhs, rhs, masked, alone",
    [
        (
            ROWS_OF_GROUPS,
            (ROWS, DEPTH),
            (GROUPS, DEPTH, COLUMNS),
            (1, ROWS, COLUMNS, GROUPS * DEPTH),
            (GROUPS, ROWS // GROUPS, COLUMNS, DEPTH),
        ),
        (
            COLUMNS_OF_GROUPS,
            (ROWS, DEPTH),
            (GROUPS, COLUMNS, DEPTH),
            (1, ROWS, COLUMNS, GROUPS * DEPTH),
            (GROUPS, ROWS // GROUPS, COLUMNS, DEPTH),
        ),
        (
            GROUPS_OF_ROWS,
            (DEPTH, ROWS),
            (ROWS, COLUMNS),
            (GROUPS, DEPTH, COLUMNS, ROWS),
            (GROUPS, DEPTH, COLUMNS, ROWS // GROUPS),
        ),
    ],
    ids=["rows", "columns", "sums"],
)
def test_products_of_groups(numbers, lhs, rhs, masked, alone):
    for mesh, lengths in ((GPUS, masked), (TPUS, alone)):
        kernel = kernel_of_groups(numbers, lhs, rhs, mesh)
        assert isinstance(kernel, Product)
        assert (kernel.count, kernel.rows, kernel.columns, kernel.depth) == lengths
        assert kernel.dtypes == ("bfloat16", "bfloat16")  # the lengths of the groups are not multiplied


def test_gradients_of_experts_take_as_long_as_the_layer():
    """The rows' gradient is a product of groups, the weights' gradient one of sums: as many FLOPs at the same rate."""
    device, rows, wide = Cluster.of("1x8 h100").device, 65536, 4096
    forward = kernel_of_groups(ROWS_OF_GROUPS, (rows, wide), (GROUPS, wide, wide), TPUS)
    weights = kernel_of_groups(GROUPS_OF_ROWS, (wide, rows), (rows, wide), TPUS)
    assert kernel_seconds(weights, device) == pytest.approx(kernel_seconds(forward, device), rel=0.1)
