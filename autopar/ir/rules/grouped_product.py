"""JAX's own kernels for products of rows in groups (megablox): one operation, with the rule of `ragged_dot`.

In:     a call that was traced from `gmm` or `tgmm` of `jax.experimental.pallas.ops.tpu.megablox`.
Out:    `grouped_product`: the operands of such a call and how it multiplies; `grouped_product_p`: the product as one operation.
Method: which tiles of rows are of which group the kernel is told by arrays that are worked out before it, for all rows. So
        the call is one operation: of other rows they are worked out anew. It is known by its program: what JAX traces with
        the blocks of the kernel in it must be the same text. Rows that fill no tile are followed by some of no group.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir

from autopar._jax import Aval, Jaxpr, JaxprEqn, Primitive, open_jaxpr

_MODULE = "jax.experimental.pallas.ops.tpu.megablox.gmm"
_ROWS_OF_GROUPS = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
_COLUMNS_OF_GROUPS = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
_GROUPS_OF_ROWS = lax.RaggedDotDimensionNumbers((((1,), (0,)), ((), ())), (1,), ())
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


def grouped_product(call: JaxprEqn) -> dict[str, Any] | None:
    """The parameters of `grouped_product_p` for a call of three arrays; None: it is another function."""
    if sys.modules.get(_MODULE) is None or call.params.get("name") not in ("gmm", "tgmm") or len(call.invars) != 3:
        return None
    body, _ = open_jaxpr(call.params["jaxpr"])
    kernels = [eqn for eqn in body.eqns if eqn.primitive.name == "pallas_call"]
    for numbers in _numbers_of(call, kernels):
        (kernel,) = kernels
        lengths = _tiles(kernel, numbers)
        params = {
            "ragged_dot_dimension_numbers": numbers,
            "preferred_element_type": call.outvars[0].aval.dtype,
            "tiles": Tiles(lengths, kernel.params["interpret"]) if lengths else None,
        }
        if lengths and _text(call.params["jaxpr"]) == _text_of(tuple(v.aval for v in call.invars), **params):
            return params
    return None


def _numbers_of(call: JaxprEqn, kernels: Sequence[JaxprEqn]) -> Sequence[lax.RaggedDotDimensionNumbers]:
    """What the call may multiply, by its shapes."""
    ndims = [var.aval.ndim for var in (*call.invars, *call.outvars)]
    if len(kernels) != 1 or ndims[2:] not in ([1, 2], [1, 3]):
        return ()
    return {(2, 3): (_ROWS_OF_GROUPS, _COLUMNS_OF_GROUPS), (2, 2): (_GROUPS_OF_ROWS,)}.get((ndims[0], ndims[1]), ())


def _tiles(kernel: JaxprEqn, numbers: lax.RaggedDotDimensionNumbers) -> tuple[int, int, int] | None:
    """Lengths of the kernel's blocks: those of the first operand and of the result."""
    shapes = [each.block_shape for each in kernel.params["grid_mapping"].block_mappings]
    if len(shapes) != 3 or len(shapes[0]) != 2:
        return None
    sizes = [getattr(block, "block_size", block) for block in (*shapes[0], shapes[2][-1])]
    return (sizes[0], sizes[1], sizes[2]) if all(isinstance(size, int) for size in sizes) else None


@functools.lru_cache(maxsize=256)
def _text_of(avals: Sequence[Aval], **params: Any) -> str:
    """The program that JAX traces for such a product."""
    structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    try:
        traced = jax.make_jaxpr(functools.partial(_call, **params))(*structs)
    except (TypeError, ValueError):  # a release in which these functions are called in another way
        return ""
    calls = [eqn for eqn in open_jaxpr(traced)[0].eqns if eqn.params.get("name") in ("gmm", "tgmm")]
    return _text(calls[0].params["jaxpr"]) if len(calls) == 1 else ""


@functools.lru_cache(maxsize=256)
def _text(program: Jaxpr) -> str:
    return str(program)


def _call(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    preferred_element_type: Any,
    tiles: Tiles,
) -> jax.Array:
    """The kernel on rows that fill its tiles."""
    module: Any = importlib.import_module(_MODULE)
    settings = {"tiling": tiles.lengths, "interpret": tiles.interpret}
    if ragged_dot_dimension_numbers == _GROUPS_OF_ROWS:
        return module.tgmm(lhs, rhs, group_sizes, preferred_element_type, **settings)
    settings["transpose_rhs"] = ragged_dot_dimension_numbers == _COLUMNS_OF_GROUPS
    return module.gmm(lhs, rhs, group_sizes, preferred_element_type, **settings)


def _multiply(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, **params: Any) -> jax.Array:
    """The product of any number of rows."""
    (ragged,) = params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
    rows = lhs.shape[ragged]
    more = -rows % params["tiles"].lengths[0]
    lhs = jnp.pad(lhs, [(0, more if dim == ragged else 0) for dim in range(lhs.ndim)]) if more else lhs
    if ragged:
        return _call(lhs, jnp.pad(rhs, [(0, more), (0, 0)]) if more else rhs, group_sizes, **params)
    return _call(lhs, rhs, group_sizes, **params)[:rows]


def _abstract(lhs: Aval, rhs: Aval, group_sizes: Aval, **params: Any) -> Aval:
    numbers = params["ragged_dot_dimension_numbers"]
    ((_, (contracted,)), _), (ragged,) = numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions
    columns = rhs.shape[3 - contracted] if numbers.rhs_group_dimensions else rhs.shape[1]
    shape = (*group_sizes.shape, lhs.shape[0], columns) if ragged else (lhs.shape[0], columns)
    return jax.core.ShapedArray(shape, params["preferred_element_type"])


grouped_product_p = Primitive("grouped_product")
grouped_product_p.def_impl(lambda *operands, **params: jax.jit(functools.partial(_multiply, **params))(*operands))
grouped_product_p.def_abstract_eval(_abstract)
mlir.register_lowering(grouped_product_p, mlir.lower_fun(_multiply, multiple_results=False))
