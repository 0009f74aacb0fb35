"""The factors of a window along one dim, for windowed reductions and convolutions.

In:     lengths, stride, padding and dilations along one dim.
Out:    `WindowFactors`: the dim in the operand, in the window (a convolution's kernel) and in the result.
Method: most windows overlap, and their dim is whole (to split it would need halo exchanges). Five kinds are plain
        reshapes and may be split: a window of one position; one window over everything; adjacent windows (patches,
        2 x 2 pooling); and the two gradients of the latter, which have a dilation in place of the stride.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.ir.rules.rule import Dim, Factor, Term
from autopar.ir.rules.terms import lengths_of, new_term


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
