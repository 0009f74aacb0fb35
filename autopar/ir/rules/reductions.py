"""Rules of reductions and of cumulative operations.

In:     `reduce_sum`, `reduce_max`, ..., `argmax`, the general `reduce`, `cumsum`, ...
Out:    a reduced dim is summed (`ab->a {sum b}`: split, the result is a partial sum), reduced at once (`{max b}`), or
        whole (`{whole b}`).
Method: sums stay partial; max, min and the logical and, or are all-reduced as such; other reductions, and the dim along
        which a cumulative operation runs, are not split.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autopar._jax import JaxprEqn, find_primitives
from autopar.ir.rules.linearity import linear_groups, may_be_extreme, may_be_partial
from autopar.ir.rules.registry import register
from autopar.ir.rules.rule import ShardingRule, factor_names, num_elements
from autopar.ir.rules.terms import new_term, sizes_of


def _is_boolean(dtype: np.dtype) -> bool:
    return dtype == np.bool_


_PARTS: dict[str, tuple[str, Callable[[np.dtype], bool]]] = {
    "sum": ("sum", may_be_partial),
    "max": ("max", may_be_extreme),
    "min": ("min", may_be_extreme),
    "or": ("max", _is_boolean),  # of the bits of integers, no collective's reduction
    "and": ("min", _is_boolean),
}
"""What a reduction of parts is a part of, and of which dtypes; other reductions are not done in parts."""


def parts_make(eqn: JaxprEqn) -> str:
    """What a reduction of parts of a dim makes, or one of windows: part of a `"sum"`, `"max"` or `"min"`; else `"whole"`."""
    name = eqn.primitive.name.removeprefix("reduce_").removeprefix("window_")
    kind, fits = _PARTS.get(name, ("whole", may_be_partial))
    return kind if fits(eqn.outvars[0].aval.dtype) else "whole"


@register(*find_primitives("argmax", "argmin", "reduce_prod", "reduce_xor", *(f"reduce_{name}" for name in _PARTS)))
def reduce_axes(eqn: JaxprEqn) -> ShardingRule:
    """`ab->a {sum b}`, `{max b}`, `{min b}` or `{whole b}`."""
    kind = parts_make(eqn)
    shape = eqn.invars[0].aval.shape
    operand = new_term(shape, factor_names())
    result = tuple(dim for d, dim in enumerate(operand) if d not in eqn.params["axes"])
    gone = tuple(dim[0] for d, dim in enumerate(operand) if d in eqn.params["axes"] and dim)
    return ShardingRule(
        (operand,),
        (result,),
        sizes_of(operand, shape),
        summed=gone if kind == "sum" else (),
        reduced=dict.fromkeys(gone, kind) if kind in ("max", "min") else {},
        whole=gone if kind == "whole" else (),
        linear=linear_groups(eqn, (0,)) if kind == "sum" else (),
        flops=float(num_elements(shape)),
    )


@register(*find_primitives("reduce"))
def reduce(eqn: JaxprEqn) -> ShardingRule:
    """n arrays and n initial scalars by any computation: `ab,ab,,->a,a {whole b}`."""
    arrays = len(eqn.outvars)
    shape = eqn.invars[0].aval.shape
    operand = new_term(shape, factor_names())
    dimensions = eqn.params["dimensions"]
    result = tuple(dim for d, dim in enumerate(operand) if d not in dimensions)
    whole = tuple(operand[d][0] for d in dimensions if operand[d])
    return ShardingRule(
        (operand,) * arrays + ((),) * arrays,
        (result,) * arrays,
        sizes_of(operand, shape),
        whole=whole,
        flops=float(arrays * num_elements(shape)),
    )


@register(*find_primitives("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"))
def cumulative(eqn: JaxprEqn) -> ShardingRule:
    """`ab->ab {whole b}`; the sum is linear."""
    shape = eqn.invars[0].aval.shape
    operand = new_term(shape, factor_names())
    is_sum = eqn.primitive.name == "cumsum"
    return ShardingRule(
        (operand,),
        (operand,),
        sizes_of(operand, shape),
        whole=operand[eqn.params["axis"]],
        linear=linear_groups(eqn, (0,)) if is_sum else (),
        flops=float(num_elements(shape)),
    )
