"""The primitive for grouped products: by JAX's own kernels (megablox), and for rows in parts that are each sorted by group.

In:     rows in the order of their groups, and a matrix per group, or other rows; the lengths of the groups, or those of the
        groups in each of several equal parts of the rows.
Out:    `grouped_product_p`; `multiply`, JAX's own function for it; `by_parts`.
Method: the kernel reads arrays, computed before it, that map tiles of rows to groups. As one primitive, the product computes
        them for whatever rows a device has. Rows that do not fill a tile are padded with rows of no group.
        `ir/trace/grouped_products.py` finds such products in a program; `ir/split/sorted_rows/` brings rows into parts.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir

from autopar._jax import Aval, Primitive
from autopar.ir.dims import apart, together

MODULE = "jax.experimental.pallas.ops.tpu.megablox.gmm"
ROWS_OF_GROUPS = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
COLUMNS_OF_GROUPS = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
GROUPS_OF_ROWS = lax.RaggedDotDimensionNumbers((((1,), (0,)), ((), ())), (1,), ())
"""`mk,gkn->mn`, `mk,gnk->mn`, `km,mn->gkn`."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Settings of the kernel.

    Attributes:
        lengths: A tile's rows, depth and columns, `gmm`'s (m, k, n).
        interpret: As in `pallas_call`.
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
    """Call the kernel on rows that fill its tiles."""
    module: Any = importlib.import_module(MODULE)
    settings = {"tiling": tiles.lengths, "interpret": tiles.interpret}
    if ragged_dot_dimension_numbers == GROUPS_OF_ROWS:
        return module.tgmm(lhs, rhs, group_sizes, preferred_element_type, **settings)
    settings["transpose_rhs"] = ragged_dot_dimension_numbers == COLUMNS_OF_GROUPS
    return module.gmm(lhs, rhs, group_sizes, preferred_element_type, **settings)


def _multiply_any(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, **params: Any) -> jax.Array:
    """The product for any number of rows, in parts or not."""
    one = functools.partial(_multiply_padded if params["tiles"] else _multiply_plain, **params)
    if group_sizes.ndim == 1:
        return one(lhs, rhs, group_sizes)
    return by_parts(one, params["ragged_dot_dimension_numbers"], lhs, rhs, group_sizes)


def _multiply_plain(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, tiles: None, **params: Any) -> jax.Array:
    return lax.ragged_dot_general(lhs, rhs, group_sizes, **params)


def _multiply_padded(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, **params: Any) -> jax.Array:
    params = {name: value for name, value in params.items() if name != "precision"}
    (ragged,) = params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
    rows = lhs.shape[ragged]
    more = -rows % params["tiles"].lengths[0]
    lhs = jnp.pad(lhs, [(0, more if dim == ragged else 0) for dim in range(lhs.ndim)]) if more else lhs
    if ragged:
        return multiply(lhs, jnp.pad(rhs, [(0, more), (0, 0)]) if more else rhs, group_sizes, **params)
    return multiply(lhs, rhs, group_sizes, **params)[:rows]


def by_parts(
    product: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    numbers: lax.RaggedDotDimensionNumbers,
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
) -> jax.Array:
    """A grouped product of rows in equal parts, part by part.

    Args:
        product: The product of one part: (lhs, rhs, lengths of the groups) to the result.
        numbers: As in `ragged_dot_general`, without batch dims.
        lhs: Rows, in parts.
        rhs: A matrix per group; or rows, in as many parts.
        group_sizes: `[part, group]`.
    """
    count, (ragged,) = len(group_sizes), numbers.lhs_ragged_dimensions
    (of_lhs, of_rhs), _ = numbers.dot_dimension_numbers
    if count == 1:
        return product(lhs, rhs, group_sizes[0])
    lhs = jnp.moveaxis(apart(lhs, ragged, count), ragged, 0)
    if ragged in of_lhs:
        rows = of_rhs[of_lhs.index(ragged)]
        parts = lhs, jnp.moveaxis(apart(rhs, rows, count), rows, 0), group_sizes
        made = jax.eval_shape(product, *(jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in parts))
        wide = jnp.promote_types(made.dtype, jnp.float32) if jnp.issubdtype(made.dtype, jnp.floating) else made.dtype
        total, _ = lax.scan(lambda sum, part: (sum + product(*part), None), jnp.zeros(made.shape, wide), parts)
        return total.astype(made.dtype)
    made = lax.map(lambda part: product(part[0], rhs, part[1]), (lhs, group_sizes))
    at = sum(d < ragged and d not in of_lhs for d in range(lhs.ndim - 1))
    return together(jnp.moveaxis(made, 0, at), at)


def _abstract(lhs: Aval, rhs: Aval, group_sizes: Aval, **params: Any) -> Aval:
    numbers = params["ragged_dot_dimension_numbers"]
    ((of_lhs, of_rhs), _), (ragged,) = numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions
    groups = group_sizes.shape[-1:] if ragged in of_lhs else ()
    kept = [size for d, size in enumerate(lhs.shape) if d not in of_lhs]
    taken = (*of_rhs, *numbers.rhs_group_dimensions)
    shape = (*groups, *kept, *(size for d, size in enumerate(rhs.shape) if d not in taken))
    return jax.core.ShapedArray(shape, params["preferred_element_type"])


grouped_product_p = Primitive("grouped_product")
grouped_product_p.def_impl(lambda *operands, **params: jax.jit(functools.partial(_multiply_any, **params))(*operands))
grouped_product_p.def_abstract_eval(_abstract)
mlir.register_lowering(grouped_product_p, mlir.lower_fun(_multiply_any, multiple_results=False))
