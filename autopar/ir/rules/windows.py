"""Rules of windowed reductions: pooling and its gradients.

In:     `reduce_window` and its kinds, `select_and_scatter_add` (the gradient of max pooling), `select_and_gather_add`.
Out:    `a(bc)->ab {whole c}` for a dim of adjacent windows; a dim along which windows have length 1 may be split; one
        that a single window covers is reduced; a dim of windows that overlap, or with padding or dilation, is whole.
Method: each dim by itself (`window.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax

from autopar._jax import JaxprEqn, bind_eqn, find_primitives
from autopar.ir.rules.reductions import reduction
from autopar.ir.rules.registry import register
from autopar.ir.rules.rule import Factor, Shard, ShardingRule, Term, factor_names, num_elements
from autopar.ir.rules.terms import factors_of, rule_of
from autopar.ir.rules.window import Window, WindowFactors


@register(*find_primitives("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"))
def reduce_window(eqn: JaxprEqn) -> ShardingRule:
    """A dim that one window covers is reduced as in `reductions.py`; operands: n arrays and n initial scalars."""
    dims = _window_factors(eqn, eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape)
    operand, result, sizes = _terms(dims)
    rule = reduction(eqn, [operand] * len(eqn.outvars), result, [f for dim in dims for f in dim.reduced], sizes)
    whole = [factor for dim in dims for factor in dim.whole if factor in sizes]
    flops = float(len(eqn.outvars) * num_elements(eqn.outvars[0].aval.shape))
    flops *= num_elements(eqn.params["window_dimensions"])

    def local(eqn: JaxprEqn, shard: Shard, *operands: jax.Array) -> Sequence[jax.Array]:
        """The window is shorter along a reduced factor that is split."""
        lengths = zip(dims, eqn.params["window_dimensions"], strict=True)
        shorter = tuple(length // math.prod(map(shard.num_shards, dim.reduced)) for dim, length in lengths)
        return bind_eqn(eqn, *operands, params={**eqn.params, "window_dimensions": shorter})

    return dataclasses.replace(rule, whole=(*whole, *rule.whole), flops=flops, local=local)


def _terms(dims: Sequence[WindowFactors]) -> tuple[Term, Term, dict[Factor, int]]:
    """The term of the array that windows go over, the term with one element per window, and the lengths of their factors."""
    operand, result = tuple(dim.operand for dim in dims), tuple(dim.result for dim in dims)
    used = factors_of(operand, result)
    return operand, result, {f: size for dim in dims for f, size in dim.sizes.items() if f in used}


def _window_factors(eqn: JaxprEqn, shape: Sequence[int], places: Sequence[int]) -> list[WindowFactors]:
    fresh = factor_names()
    ones = (1,) * len(shape)
    params = eqn.params
    return [
        Window(*dim).factors(fresh)
        for dim in zip(
            shape,
            places,
            params["window_dimensions"],
            params["window_strides"],
            params["padding"],
            params.get("base_dilation", ones),
            params.get("window_dilation", ones),
            strict=True,
        )
    ]


@register(*find_primitives("select_and_scatter_add", "select_and_gather_add"))
def select_and_move(eqn: JaxprEqn) -> ShardingRule:
    """(source or tangents, operand): select one position in each window of the operand. Linear in the first operand.

    `select_and_scatter_add` adds each source element at the position selected in its window; `select_and_gather_add`
    takes the tangent at that position.
    """
    shape, first = eqn.invars[1].aval.shape, eqn.invars[0].aval.shape
    places = first if eqn.primitive.name == "select_and_scatter_add" else eqn.outvars[0].aval.shape
    rule = _selection(eqn, _window_factors(eqn, shape, places), moved=0, operand=1)
    return dataclasses.replace(rule, zeros_like=1 if eqn.primitive.name == "select_and_scatter_add" else None)


@register(*find_primitives("select_and_scatter"))
def select_and_scatter(eqn: JaxprEqn) -> ShardingRule:
    """Operands: (operand, source, initial scalar); any selection and scatter functions."""
    shape, places = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    return _selection(eqn, _window_factors(eqn, shape, places), moved=1, operand=0)


def _selection(eqn: JaxprEqn, dims: Sequence[WindowFactors], moved: int, operand: int) -> ShardingRule:
    long, short, sizes = _terms(dims)
    operands: list[Term] = [()] * len(eqn.invars)
    operands[operand] = long
    operands[moved] = long if eqn.invars[moved].aval.shape == eqn.invars[operand].aval.shape else short
    result = long if eqn.outvars[0].aval.shape == eqn.invars[operand].aval.shape else short
    linear = [(moved,)] if operand == 1 else ()
    whole = tuple(f for dim in dims for f in (*dim.whole, *dim.reduced) if f in sizes)
    flops = float(num_elements(eqn.invars[operand].aval.shape))
    return rule_of(eqn, operands, [result], linear, sizes, whole=whole, flops=flops)
