"""Rules of windowed reductions: pooling and its gradients; and `Window`, one dim of them or of a convolution.

In:     `reduce_window` and its kinds, `select_and_scatter_add` (the gradient of max pooling), `select_and_gather_add`.
Out:    `a(bc)->ab {whole c}` for a dim of adjacent windows; a dim along which windows have length 1 may be split; one
        that a single window covers is reduced; a dim of windows that overlap, or with padding or dilation, is whole.
Method: each dim by itself. Most windows overlap, and their dim is whole (to split it would need halo exchanges). Five kinds
        are plain reshapes and may be split: a window of one position; one window over everything; adjacent windows
        (patches, 2 x 2 pooling); and the two gradients of the latter, which have a dilation in place of the stride.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax

from autopar._jax import JaxprEqn, bind_eqn, find_primitives
from autopar.ir.rules.reductions import reduction
from autopar.ir.rules.registry import register
from autopar.ir.rules.rule import Dim, Factor, Shard, ShardingRule, Term, factor_names, num_elements
from autopar.ir.rules.terms import factors_of, lengths_of, new_term, rule_of


@dataclass(frozen=True, slots=True)
class WindowFactors:
    """One dim in the operand, in the window and in the result.

    `whole`: factors that may not be split; `reduced`: factors of the window, which may be: the result is a reduction over them.
    """

    operand: Dim
    window: Dim
    result: Dim
    sizes: Mapping[Factor, int]
    whole: tuple[Factor, ...] = ()
    reduced: tuple[Factor, ...] = ()


@dataclass(frozen=True, slots=True)
class Window:
    """A window of `size` positions along a dim of `length`, at `places` positions, one per result element."""

    length: int
    places: int
    size: int
    stride: int = 1
    padding: tuple[int, int] = (0, 0)
    base_dilation: int = 1
    window_dilation: int = 1

    def factors(self, fresh: Iterator[Factor]) -> WindowFactors:
        """The dim in factors, with names from `fresh`."""
        length, places, size, stride = self.length, self.places, self.size, self.stride
        undilated, unpadded = self.base_dilation == self.window_dilation == 1, tuple(self.padding) == (0, 0)
        if size == stride == 1 and self.base_dilation == 1 and unpadded:  # each position is one place
            sizes, (dim,) = _new_dims(fresh, length)
            return WindowFactors(dim, (), dim, sizes)
        if places == 1 and size == length and undilated and unpadded:  # one window over everything
            sizes, (dim,) = _new_dims(fresh, length)
            return WindowFactors(dim, dim, (), sizes, reduced=dim)
        if size == stride and length == places * size and undilated and unpadded:  # side by side
            sizes, (place, inside) = _new_dims(fresh, places, size)
            return WindowFactors((*place, *inside), inside, place, sizes, whole=inside)
        if stride == 1 and length == places * size and self.window_dilation == places and unpadded:
            if self.base_dilation == 1:  # result[j] = sum over i of operand[i, j] * window[i]
                sizes, (step, place) = _new_dims(fresh, size, places)
                return WindowFactors((*step, *place), step, place, sizes, whole=place, reduced=step)
        if stride == 1 and places == length * size and self.base_dilation == size and self.window_dilation == 1:
            if tuple(self.padding) == (size - 1, size - 1):  # result[i, j] = operand[i] * window[size - 1 - j]
                sizes, (place, inside) = _new_dims(fresh, length, size)
                return WindowFactors(place, inside, (*place, *inside), sizes, whole=inside)
        sizes, (operand, window, result) = _new_dims(fresh, length, size, places)
        return WindowFactors(operand, window, result, sizes, whole=(*operand, *window, *result))


def _new_dims(fresh: Iterator[Factor], *lengths: int) -> tuple[dict[Factor, int], Term]:
    """The sizes of new factors, and a dim for each length; a length of 1 has no factor."""
    dims = new_term(lengths, fresh)
    return lengths_of(dims, lengths), dims


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
    scatters = eqn.primitive.name == "select_and_scatter_add"
    places = first if scatters else eqn.outvars[0].aval.shape
    rule = _selection(eqn, _window_factors(eqn, shape, places), moved=0, operand=1)
    return dataclasses.replace(rule, selected=(1, 0)) if scatters else rule


@register(*find_primitives("select_and_scatter"))
def select_and_scatter(eqn: JaxprEqn) -> ShardingRule:
    """Operands: (operand, source, initial scalar); any selection and scatter functions."""
    shape, places = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    rule = _selection(eqn, _window_factors(eqn, shape, places), moved=1, operand=0)
    return dataclasses.replace(rule, selected=(0, 1))


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
