"""Rules of reductions and of cumulative operations.

In:     `reduce_sum`, `reduce_max`, ..., `argmax`, the general `reduce`, `cumsum`, ...
Out:    a reduced dim is summed (`ab->a {sum b}`: if split, the result is a partial sum), reduced at once (`{max b}`), or
        whole (`{whole b}`).
Method: sums stay partial; max, min and the logical and, or are all-reduced as such; dims of other reductions, and the dim
        along which a cumulative operation runs, are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from autopar._jax import JaxprEqn, find_primitives
from autopar.ir.rules.linearity import may_be_extreme, may_be_partial
from autopar.ir.rules.registry import register
from autopar.ir.rules.rule import Factor, ShardingRule, Term, num_elements
from autopar.ir.rules.terms import new_term, rule_of, without


def _is_boolean(dtype: np.dtype) -> bool:
    return dtype == np.bool_


_PARTS: dict[str, tuple[str, Callable[[np.dtype], bool]]] = {
    "sum": ("sum", may_be_partial),
    "max": ("max", may_be_extreme),
    "min": ("min", may_be_extreme),
    "or": ("max", _is_boolean),  # no collective does bitwise reductions of integers
    "and": ("min", _is_boolean),
}
"""Reductions that may be split: the collective that joins the partial results, and a test of the dtype."""


_BY_NAME = tuple(f"reduce_{name}" for name in _PARTS)


@register(*find_primitives("argmax", "argmin", "reduce", "reduce_prod", "reduce_xor", *_BY_NAME))
def reduce(eqn: JaxprEqn) -> ShardingRule:
    """`ab->a {sum b}`, `{max b}`, `{min b}` or `{whole b}`; `reduce` of n arrays and n initial scalars by any computation:
    `ab,ab,,->a,a {whole b}`."""
    operand = new_term(eqn.invars[0].aval.shape)
    dims = eqn.params["dimensions" if eqn.primitive.name == "reduce" else "axes"]
    gone = tuple(factor for d in dims for factor in operand[d])
    return reduction(eqn, [operand] * len(eqn.outvars), without(operand, dims), gone)


def reduction(
    eqn: JaxprEqn,
    operands: Sequence[Term],
    result: Term,
    gone: Sequence[Factor],
    sizes: Mapping[Factor, int] | None = None,
) -> ShardingRule:
    """The rule of a reduction over the factors `gone`: they may be split if a collective can join the partial results."""
    name = eqn.primitive.name.removeprefix("reduce_").removeprefix("window_")
    kind, fits = _PARTS.get(name, ("whole", may_be_partial))
    kind = kind if fits(eqn.outvars[0].aval.dtype) else "whole"
    return rule_of(
        eqn,
        operands,
        [result],
        [(0,)] if kind == "sum" else (),
        sizes,
        summed=tuple(gone) if kind == "sum" else (),
        reduced=dict.fromkeys(gone, kind) if kind in ("max", "min") else {},
        whole=tuple(gone) if kind == "whole" else (),
        flops=float(len(operands) * num_elements(eqn.invars[0].aval.shape)),
    )


@register(*find_primitives("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"))
def cumulative(eqn: JaxprEqn) -> ShardingRule:
    """`ab->ab {whole b}`; the sum is linear."""
    shape = eqn.invars[0].aval.shape
    term, linear = new_term(shape), [(0,)] if eqn.primitive.name == "cumsum" else ()
    return rule_of(eqn, [term], [term], linear, whole=term[eqn.params["axis"]], flops=float(num_elements(shape)))
