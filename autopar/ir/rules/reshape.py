"""The rule of `reshape`: merged and split dims are dims of several factors.

In:     a `reshape` equation.
Out:    `a(bc)->abc` for a split, `abc->(ab)c` for a merge; devices split a dim by its first factor.
Method: source and target are read from the major side; a factor ends where both products are equal. Where lengths do not
        divide each other (12 x 10 to 8 x 15), their common divisor (4) is a factor, and the rest of that group is whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import jax
from jax import lax

from autopar._jax import JaxprEqn, find_primitives
from autopar.ir.rules.registry import register
from autopar.ir.rules.rule import Factor, Shard, ShardingRule, factor_names
from autopar.ir.rules.terms import lengths_of, new_term, rule_of


@register(*find_primitives("reshape"))
def reshape(eqn: JaxprEqn) -> ShardingRule:
    """`a(bc)->abc`, `abc->(ab)c`, ..."""
    source, target = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    order = eqn.params["dimensions"]
    order = tuple(range(len(source))) if order is None else tuple(order)
    permuted, result, sizes, whole = factor_shapes([source[d] for d in order], target)
    operand = [permuted[order.index(d)] for d in range(len(source))]

    def local(eqn: JaxprEqn, shard: Shard, array: jax.Array, *_: jax.Array) -> Sequence[jax.Array]:
        return [lax.reshape(array, [shard.local_dim(dim) for dim in result], eqn.params["dimensions"])]

    return rule_of(eqn, [tuple(operand)], [tuple(result)], [(0,)], sizes, whole=whole, moves_data=True, local=local)


def factor_shapes(
    source: Sequence[int], target: Sequence[int]
) -> tuple[list[tuple[Factor, ...]], list[tuple[Factor, ...]], dict[Factor, int], tuple[Factor, ...]]:
    """The factors of two shapes of equal size: source dims, target dims, lengths of factors, whole factors."""
    fresh = factor_names()
    if 0 in source:
        return _separate(source, target, fresh)
    left, right = _Side(source), _Side(target)
    sizes: dict[Factor, int] = {}
    whole: list[Factor] = []
    while left.advance() and right.advance():
        common = math.gcd(left.rest, right.rest)
        if common > 1:
            factor = next(fresh)
            sizes[factor] = common
            left.take(factor, common)
            right.take(factor, common)
        if left.rest > 1 and right.rest > 1:
            # They do not divide: up to where the products are equal again, each side has factors of its own.
            for side, length in _until_equal(left, right):
                factor = next(fresh)
                sizes[factor] = length
                whole.append(factor)
                side.take(factor, length)
    return left.dims, right.dims, sizes, tuple(whole)


class _Side:
    """One shape, read from the major side; `rest`: the length of the present dim that has no factor yet."""

    def __init__(self, shape: Sequence[int]):
        self.shape, self.at, self.rest = tuple(shape), -1, 1
        self.dims: list[tuple[Factor, ...]] = [()] * len(self.shape)

    def advance(self) -> bool:
        """Go on to the next dim if `rest` is used up; False at the end."""
        while self.rest == 1:
            self.at += 1
            if self.at >= len(self.shape):
                return False
            self.rest = self.shape[self.at]
        return True

    def take(self, factor: Factor, length: int) -> None:
        self.dims[self.at] += (factor,)
        self.rest //= length


def _until_equal(left: _Side, right: _Side) -> Iterator[tuple[_Side, int]]:
    """Yield (side, rest of a dim), from whichever side has the smaller product so far, until both products are equal."""
    taken = {id(left): 1, id(right): 1}
    while True:
        side = left if taken[id(left)] <= taken[id(right)] else right
        if taken[id(left)] == taken[id(right)] > 1 or not side.advance():
            return
        taken[id(side)] *= side.rest
        yield side, side.rest


def _separate(source: Sequence[int], target: Sequence[int], fresh: Iterator[Factor]):
    """The factors for an array without elements: equal dims at both ends are shared, those between are whole."""
    least = min(len(source), len(target))
    front = next((k for k in range(least) if source[k] != target[k]), least)
    behind = next((k for k in range(least - front) if source[-1 - k] != target[-1 - k]), least - front)
    sizes: dict[Factor, int] = {}

    def terms(shape: Sequence[int]) -> list[tuple[Factor, ...]]:
        dims = new_term(shape, fresh)
        sizes.update(lengths_of(dims, shape))
        return list(dims)

    first, last = terms(source[:front]), terms(source[len(source) - behind :])
    shared = len(sizes)
    dims = (
        first + terms(source[front : len(source) - behind]) + last,
        first + terms(target[front : len(target) - behind]) + last,
    )
    return *dims, sizes, tuple(sizes)[shared:]
