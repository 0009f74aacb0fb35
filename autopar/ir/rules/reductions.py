"""Rules of reductions and of cumulative operations.

In:     `reduce_sum`, `reduce_max`, ..., `argmax`, the general `reduce`, `cumsum`, ...
Out:    a reduced dim is summed (`ab->a {sum b}`: split, the result is a partial sum), reduced at once (`{max b}`), or
        whole (`{whole b}`).
Method: sums stay partial; max, min and the logical and, or are all-reduced as such; other reductions, and the dim along
        which a cumulative operation runs, are not split.
"""

from __future__ import annotations

import numpy as np

from autopar._jax import JaxprEqn, find_primitives
from autopar.ir.rules.linearity import linear_groups, may_be_extreme, may_be_partial
from autopar.ir.rules.registry import register
from autopar.ir.rules.rule import ShardingRule, factor_names, num_elements
from autopar.ir.rules.terms import new_term, sizes_of


@register(*find_primitives("reduce_sum"))
def reduce_sum(eqn: JaxprEqn) -> ShardingRule:
    """`ab->a {sum b}`."""
    if not may_be_partial(eqn.outvars[0].aval.dtype):
        return _reduction(eqn, "whole")
    return _reduction(eqn, "sum")


@register(*find_primitives("reduce_max"))
def reduce_max(eqn: JaxprEqn) -> ShardingRule:
    """`ab->a {max b}`."""
    return _reduction(eqn, "max" if may_be_extreme(eqn.outvars[0].aval.dtype) else "whole")


@register(*find_primitives("reduce_min"))
def reduce_min(eqn: JaxprEqn) -> ShardingRule:
    """`ab->a {min b}`."""
    return _reduction(eqn, "min" if may_be_extreme(eqn.outvars[0].aval.dtype) else "whole")


@register(*find_primitives("reduce_or"))
def reduce_or(eqn: JaxprEqn) -> ShardingRule:
    """Of booleans, the max; of the bits of integers, no collective's reduction."""
    return _reduction(eqn, "max" if eqn.outvars[0].aval.dtype == np.bool_ else "whole")


@register(*find_primitives("reduce_and"))
def reduce_and(eqn: JaxprEqn) -> ShardingRule:
    """Of booleans, the min; of the bits of integers, no collective's reduction."""
    return _reduction(eqn, "min" if eqn.outvars[0].aval.dtype == np.bool_ else "whole")


@register(*find_primitives("argmax", "argmin", "reduce_prod", "reduce_xor"))
def reduce_whole(eqn: JaxprEqn) -> ShardingRule:
    """`ab->a {whole b}`: the reduced dims are not split, the others freely."""
    return _reduction(eqn, "whole")


def _reduction(eqn: JaxprEqn, kind: str) -> ShardingRule:
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
