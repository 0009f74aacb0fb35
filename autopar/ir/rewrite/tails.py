"""Tails: the elements that padding adds to a dim.

In:     an array, and the tails of some of its dims.
Out:    the array padded, cut back, or with its tails filled with a number.
Method: a dim may be a product of several factors (`(b t)`, `(h d)`), of which one is padded: it is `outer` runs of `padded`
        groups of `inner` elements, of which the first `valid` groups of each run are the user's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autopar.ir.rules.rule import Dim, Factor


@dataclass(frozen=True, slots=True, order=True)
class Tail:
    """How a dim, or a factor of one, is padded; see the top of this file."""

    outer: int
    valid: int
    padded: int
    inner: int

    @property
    def length(self) -> int:
        """Length of the padded dim."""
        return self.outer * self.padded * self.inner

    def of_dim(self, dim: Dim, factor: Factor, sizes: Mapping[Factor, int]) -> Tail:
        """The tail of a dim, from this one of its `factor`."""
        before, behind = _around(dim, factor, sizes)
        return Tail(before * self.outer, self.valid, self.padded, self.inner * behind)

    def of_factor(self, dim: Dim, factor: Factor, sizes: Mapping[Factor, int]) -> Tail | None:
        """The tail of one factor, from this one of its dim; None: that factor is not padded, or not it alone."""
        before, behind = _around(dim, factor, sizes)
        outer, inner = self.outer // before, self.inner // behind
        fits = self.outer % before == 0 == self.inner % behind and outer * self.valid * inner == sizes[factor]
        return Tail(outer, self.valid, self.padded, inner) if fits else None


Tails = Mapping[int, Tail]
"""The padded dims of an array, each with its tail."""


def _around(dim: Dim, factor: Factor, sizes: Mapping[Factor, int]) -> tuple[int, int]:
    at = dim.index(factor)
    return math.prod(sizes[f] for f in dim[:at]), math.prod(sizes[f] for f in dim[at + 1 :])


def lengthen(array: jax.Array, dim: int, tail: Tail) -> jax.Array:
    """Pad one dim with zeros."""
    apart, at = _apart(array, dim, tail, tail.valid)
    config = [(0, tail.padded - tail.valid if d == at else 0, 0) for d in range(apart.ndim)]
    return _joined(lax.pad(apart, jnp.zeros((), array.dtype), config), dim, array.ndim)


def cut(array: jax.Array, dim: int, tail: Tail) -> jax.Array:
    """Cut the tail off one dim."""
    apart, at = _apart(array, dim, tail, tail.padded)
    limits = [tail.valid if d == at else size for d, size in enumerate(apart.shape)]
    return _joined(lax.slice(apart, [0] * apart.ndim, limits), dim, array.ndim)


def _apart(array: jax.Array, dim: int, tail: Tail, length: int) -> tuple[jax.Array, int]:
    """The array reshaped so that the padded factor is a dim of its own, and the number of that dim."""
    if tail.outer == 1 == tail.inner:
        return array, dim
    shape = (*array.shape[:dim], tail.outer, length, tail.inner, *array.shape[dim + 1 :])
    return lax.reshape(array, shape), dim + 1


def _joined(apart: jax.Array, dim: int, ndim: int) -> jax.Array:
    if apart.ndim == ndim:
        return apart
    length = math.prod(apart.shape[dim : dim + 3])
    return lax.reshape(apart, (*apart.shape[:dim], length, *apart.shape[dim + 3 :]))


def fill_tails(array: jax.Array, tails: Tails, value: bool | int | float) -> jax.Array:
    """Fill the tails of the array's dims with a number."""
    for dim, tail in tails.items():
        place = lax.iota(np.int32, tail.length)
        if tail.inner > 1:
            place = lax.div(place, np.int32(tail.inner))
        if tail.outer > 1:
            place = lax.rem(place, np.int32(tail.padded))
        mine = lax.broadcast_in_dim(lax.lt(place, np.int32(tail.valid)), array.shape, (dim,))
        array = lax.select_n(mine, lax.full(array.shape, value, array.dtype), array)
    return array
