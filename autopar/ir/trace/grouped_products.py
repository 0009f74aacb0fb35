"""JAX's own kernels for products of rows in groups (megablox), found in a program that is traced.

In:     a call.
Out:    `grouped_product`: how it multiplies, as parameters of `grouped_product_p`; None: it is another function.
Method: it is known by its program: what JAX traces for the product, with the blocks of the kernel in it, must be the same text.
        So another function of that name, or another release's, is no such product, and its kernel is one of the user's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from autopar._jax import Aval, Jaxpr, JaxprEqn, open_jaxpr
from autopar.ir.rules.grouped_product import COLUMNS_OF_GROUPS, GROUPS_OF_ROWS, MODULE, ROWS_OF_GROUPS, Tiles, multiply


def grouped_product(call: JaxprEqn) -> dict[str, Any] | None:
    """The parameters of `grouped_product_p` for a call of three arrays; None: it is another function."""
    if sys.modules.get(MODULE) is None or call.params.get("name") not in ("gmm", "tgmm") or len(call.invars) != 3:
        return None
    body, _ = open_jaxpr(call.params["jaxpr"])
    kernels = [eqn for eqn in body.eqns if eqn.primitive.name == "pallas_call"]
    lengths = _tiles(kernels[0]) if len(kernels) == 1 else None
    if lengths is None:
        return None
    for numbers in _numbers_of(call):
        params = {
            "ragged_dot_dimension_numbers": numbers,
            "preferred_element_type": call.outvars[0].aval.dtype,
            "tiles": Tiles(lengths, kernels[0].params["interpret"]),
        }
        if _text(call.params["jaxpr"]) == _text_of(tuple(v.aval for v in call.invars), **params):
            return {**params, "precision": None}
    return None


def _numbers_of(call: JaxprEqn) -> Sequence[lax.RaggedDotDimensionNumbers]:
    """What the call may multiply, by its shapes."""
    ndims = [var.aval.ndim for var in (*call.invars, *call.outvars)]
    if ndims[2:] not in ([1, 2], [1, 3]):
        return ()
    return {(2, 3): (ROWS_OF_GROUPS, COLUMNS_OF_GROUPS), (2, 2): (GROUPS_OF_ROWS,)}.get((ndims[0], ndims[1]), ())


def _tiles(kernel: JaxprEqn) -> tuple[int, int, int] | None:
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
        traced = jax.make_jaxpr(functools.partial(multiply, **params))(*structs)
    except (TypeError, ValueError):  # a release in which these functions are called in another way
        return ""
    calls = [eqn for eqn in open_jaxpr(traced)[0].eqns if eqn.params.get("name") in ("gmm", "tgmm")]
    return _text(calls[0].params["jaxpr"]) if len(calls) == 1 else ""


@functools.lru_cache(maxsize=256)
def _text(program: Jaxpr) -> str:
    return str(program)
