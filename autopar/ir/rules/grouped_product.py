"""JAX's own kernels for products of rows in groups (megablox): one operation, with the rule of `ragged_dot`.

In:     rows in the order of their groups, and a matrix for each group, or other rows; lengths of the groups.
Out:    `grouped_product_p`; `multiply`, JAX's own function for it.
Method: which tiles of rows are of which group the kernel is told by arrays that are worked out before it, for all rows: of
        other rows they are worked out anew. Rows that fill no tile are followed by some of no group. Which calls in a program
        are such products is found in `ir/trace/grouped_products.py`.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir

from autopar._jax import Aval, Primitive

MODULE = "jax.experimental.pallas.ops.tpu.megablox.gmm"
ROWS_OF_GROUPS = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
COLUMNS_OF_GROUPS = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
GROUPS_OF_ROWS = lax.RaggedDotDimensionNumbers((((1,), (0,)), ((), ())), (1,), ())
"""`mk,gkn->mn`, `mk,gnk->mn`, `km,mn->gkn`."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a kernel is run.

    Attributes:
        lengths: Of a tile: rows, depth and columns as `gmm` names them (m, k, n).
        interpret: As of `pallas_call`.
    """

    lengths: tuple[int, int, int]
    interpret: Any


def multiply(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    preferred_element_type: Any,
    tiles: Tiles,
) -> jax.Array:
    """The kernel on rows that fill its tiles."""
    module: Any = importlib.import_module(MODULE)
    settings = {"tiling": tiles.lengths, "interpret": tiles.interpret}
    if ragged_dot_dimension_numbers == GROUPS_OF_ROWS:
        return module.tgmm(lhs, rhs, group_sizes, preferred_element_type, **settings)
    settings["transpose_rhs"] = ragged_dot_dimension_numbers == COLUMNS_OF_GROUPS
    return module.gmm(lhs, rhs, group_sizes, preferred_element_type, **settings)


def _multiply_padded(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, **params: Any) -> jax.Array:
    """The product of any number of rows."""
    (ragged,) = params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
    rows = lhs.shape[ragged]
    more = -rows % params["tiles"].lengths[0]
    lhs = jnp.pad(lhs, [(0, more if dim == ragged else 0) for dim in range(lhs.ndim)]) if more else lhs
    if ragged:
        return multiply(lhs, jnp.pad(rhs, [(0, more), (0, 0)]) if more else rhs, group_sizes, **params)
    return multiply(lhs, rhs, group_sizes, **params)[:rows]


def _abstract(lhs: Aval, rhs: Aval, group_sizes: Aval, **params: Any) -> Aval:
    numbers = params["ragged_dot_dimension_numbers"]
    ((_, (contracted,)), _), (ragged,) = numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions
    columns = rhs.shape[3 - contracted] if numbers.rhs_group_dimensions else rhs.shape[1]
    shape = (*group_sizes.shape, lhs.shape[0], columns) if ragged else (lhs.shape[0], columns)
    return jax.core.ShapedArray(shape, params["preferred_element_type"])


grouped_product_p = Primitive("grouped_product")
grouped_product_p.def_impl(
    lambda *operands, **params: jax.jit(functools.partial(_multiply_padded, **params))(*operands)
)
grouped_product_p.def_abstract_eval(_abstract)
mlir.register_lowering(grouped_product_p, mlir.lower_fun(_multiply_padded, multiple_results=False))
