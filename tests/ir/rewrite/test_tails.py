"""Tails of dims that were made longer: put on, cut off, filled."""

import math

import numpy as np
import pytest

from autopar.ir.rewrite.tails import Tail, cut, fill_tails, lengthen

TAILS = [Tail(1, 6, 8, 1), Tail(2, 3, 4, 1), Tail(1, 3, 5, 2), Tail(3, 1, 2, 2)]


def array(tail, dim):
    length = tail.outer * tail.valid * tail.inner
    shape = (length, 3) if dim == 0 else (3, length)
    return np.arange(1, 1 + math.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("tail", TAILS, ids=str)
def test_longer_and_back(tail, dim):
    whole = array(tail, dim)
    longer = lengthen(whole, dim, tail)
    assert longer.shape[dim] == tail.length and longer.sum() == whole.sum()
    np.testing.assert_array_equal(cut(longer, dim, tail), whole)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("tail", TAILS, ids=str)
def test_filled(tail, dim):
    """What is the user's stays; everything else is the number."""
    whole = array(tail, dim)
    filled = np.asarray(fill_tails(lengthen(whole, dim, tail) - 1, {dim: tail}, -7.0))
    np.testing.assert_array_equal(cut(filled, dim, tail), whole - 1)
    assert (filled == -7).sum() == filled.size - whole.size


def test_tails_of_factors_are_those_of_their_dim():
    """`(h d)` of 3 times 2, of which h becomes 5."""
    sizes = {"h": 3, "d": 2}
    of_dim = Tail(1, 3, 5, 1).of_dim(("h", "d"), "h", sizes)
    assert of_dim == Tail(1, 3, 5, 2)
    assert of_dim.of_factor(("h", "d"), "h", sizes) == Tail(1, 3, 5, 1)
    assert of_dim.of_factor(("h", "d"), "d", sizes) is None
