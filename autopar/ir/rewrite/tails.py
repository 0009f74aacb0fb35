"""Tails: what stands behind the elements of a dim that was made longer than the user's.

In:     an array, and of some of its dims how they are longer.
Out:    the array longer, cut back, or with a number in its tails that has no part in a sum or a maximum.
Method: a dim may be made of several (`(b t)`, `(h d)`), of which one is longer: it is `outer` runs of `padded` groups of
        `inner` elements, of which the first `valid` groups of each run are the user's.
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
    """How a dim, or a factor of one, is longer; see the top of this file."""

    outer: int
    valid: int
    padded: int
    inner: int

    @property
    def length(self) -> int:
        """Of the longer dim."""
        return self.outer * self.padded * self.inner

    def of_dim(self, dim: Dim, factor: Factor, sizes: Mapping[Factor, int]) -> Tail:
        """How a dim is longer of which this is one factor."""
        before, behind = _around(dim, factor, sizes)
        return Tail(before * self.outer, self.valid, self.padded, self.inner * behind)

    def of_factor(self, dim: Dim, factor: Factor, sizes: Mapping[Factor, int]) -> Tail | None:
        """How one factor of this dim is longer; None: it is not, or not it alone."""
        before, behind = _around(dim, factor, sizes)
        outer, inner = self.outer // before, self.inner // behind
        fits = self.outer % before == 0 == self.inner % behind and outer * self.valid * inner == sizes[factor]
        return Tail(outer, self.valid, self.padded, inner) if fits else None


Tails = Mapping[int, Tail]
"""Of an array, the dims that are longer."""


def _around(dim: Dim, factor: Factor, sizes: Mapping[Factor, int]) -> tuple[int, int]:
    at = dim.index(factor)
    return math.prod(sizes[f] for f in dim[:at]), math.prod(sizes[f] for f in dim[at + 1 :])


def lengthen(array: jax.Array, dim: int, tail: Tail) -> jax.Array:
    """The array with zeros in the tail of one dim."""
    apart, at = _apart(array, dim, tail, tail.valid)
    config = [(0, tail.padded - tail.valid if d == at else 0, 0) for d in range(apart.ndim)]
    return _joined(lax.pad(apart, jnp.zeros((), array.dtype), config), dim, tail, array.ndim)


def cut(array: jax.Array, dim: int, tail: Tail) -> jax.Array:
    """The array without the tail of one dim."""
    apart, at = _apart(array, dim, tail, tail.padded)
    limits = [tail.valid if d == at else size for d, size in enumerate(apart.shape)]
    return _joined(lax.slice(apart, [0] * apart.ndim, limits), dim, tail, array.ndim)


def _apart(array: jax.Array, dim: int, tail: Tail, length: int) -> tuple[jax.Array, int]:
    """The array with the longer part of a dim by itself, and where."""
    if tail.outer == 1 == tail.inner:
        return array, dim
    shape = (*array.shape[:dim], tail.outer, length, tail.inner, *array.shape[dim + 1 :])
    return lax.reshape(array, shape), dim + 1


def _joined(apart: jax.Array, dim: int, tail: Tail, ndim: int) -> jax.Array:
    if apart.ndim == ndim:
        return apart
    length = math.prod(apart.shape[dim : dim + 3])
    return lax.reshape(apart, (*apart.shape[:dim], length, *apart.shape[dim + 3 :]))


def fill_tails(array: jax.Array, tails: Tails, value: bool | int | float) -> jax.Array:
    """The array with a number in the tails of its dims."""
    for dim, tail in tails.items():
        place = lax.iota(np.int32, tail.length)
        if tail.inner > 1:
            place = lax.div(place, np.int32(tail.inner))
        if tail.outer > 1:
            place = lax.rem(place, np.int32(tail.padded))
        mine = lax.broadcast_in_dim(lax.lt(place, np.int32(tail.valid)), array.shape, (dim,))
        array = lax.select_n(mine, lax.full(array.shape, value, array.dtype), array)
    return array
