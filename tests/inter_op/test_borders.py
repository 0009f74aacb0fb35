"""Borders of stages and layers in a chain, against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autopar._jax import make_jaxpr
from autopar.inter_op.borders import balanced_borders
from autopar.inter_op.chain import Chain

EMPTY = make_jaxpr([], [], [])


def hand_made(work, cut_bytes, marks=(), kinds=()):
    """A chain of which only the numbers are known."""
    assert len(cut_bytes) == len(work) + 1
    num = len(work)
    return Chain(EMPTY, (), tuple(range(num)), num, tuple(work), np.array(cut_bytes, float), tuple(marks), tuple(kinds))


def draw(seed):
    """A chain of up to nine segments; integers, so that ties are frequent."""
    random = np.random.default_rng(seed)
    count = int(random.integers(2, 10))
    work = random.integers(0, 8, count) * random.choice([1, 1, 10], count)
    return hand_made(work, [0, *random.integers(1, 40, count - 1), 0])


def largest(chain, borders):
    """Work of the stage that has most."""
    ends = (*borders[1:], chain.num_segments)
    return max(chain.work[a:b].sum() for a, b in zip(borders, ends, strict=True))


def all_borders(chain, num_stages):
    return [(0, *rest) for rest in itertools.combinations(range(1, chain.num_segments), num_stages - 1)]


@pytest.mark.parametrize("block", range(4))
def test_borders_against_brute_force(block):
    off_balance = 0
    for seed in range(30 * block, 30 * block + 30):
        chain = draw(seed)
        for num_stages in range(1, min(4, chain.num_segments) + 1):
            for slack in (0.1, 0.5):
                borders = balanced_borders(chain, num_stages, slack)
                known = all_borders(chain, num_stages)
                assert borders in known, (seed, num_stages)
                least = min(largest(chain, b) for b in known)
                cap = (1 + slack) * least
                assert largest(chain, borders) <= cap * (1 + 1e-9), (seed, num_stages)
                fitting = [b for b in known if largest(chain, b) <= cap]
                wanted = min(chain.cut_bytes[list(b)].sum() for b in fitting)
                assert chain.cut_bytes[list(borders)].sum() == wanted, (seed, num_stages, slack)
                off_balance += largest(chain, borders) > least
    assert off_balance > 5, "balance is given up for bytes now and then"


def test_borders_by_hand():
    equal = hand_made([1] * 8, [0, *[5] * 7, 0])
    assert balanced_borders(equal, 1) == (0,)
    assert balanced_borders(equal, 2) == (0, 4)
    assert balanced_borders(equal, 4) == (0, 2, 4, 6)
    assert balanced_borders(equal, 8) == tuple(range(8))
    narrow = hand_made([10] * 8, [0, 9, 9, 9, 9, 1, 9, 9, 0])
    assert balanced_borders(narrow, 2) == (0, 4), "five tenths are more than a tenth over four"
    assert balanced_borders(narrow, 2, slack=0.25) == (0, 5)
    assert balanced_borders(hand_made([100, 1, 1, 1, 1], [0, 9, 5, 2, 5, 0]), 2) == (0, 3), "no one has less than 100"
    nothing = hand_made([0, 0, 0], [0, 3, 2, 0])
    assert balanced_borders(nothing, 2) == (0, 2)


def test_stages_begin_at_marks():
    equal = [1] * 8, [0, *[5] * 7, 0]
    assert balanced_borders(hand_made(*equal, marks=(1, 6)), 1) == (0,)
    assert balanced_borders(hand_made(*equal, marks=(1, 5, 7)), 2) == (0, 5), "of the marks the most balanced"
    assert balanced_borders(hand_made(*equal, marks=(1, 6)), 3) == (0, 1, 6)
    assert balanced_borders(hand_made(*equal, marks=(6,)), 4) == (0, 2, 4, 6), "further ones where most work is"
    assert balanced_borders(hand_made(*equal, marks=(1,)), 8) == tuple(range(8))
    uneven = hand_made([9, 1, 1, 1, 1], [0, 5, 5, 9, 1, 0], marks=(1,))
    assert balanced_borders(uneven, 3) == (0, 1, 3), "stages behind a mark are balanced among themselves"


def test_stages_begin_at_the_same_place_of_equal_layers():
    # Ten layers of three segments, each with two places that send as little, and a head of two segments.
    chain = hand_made([2, 1, 1] * 10 + [1, 1], [0, *([9, 5, 5] * 11)[:31], 0], kinds=[0, 1, 2] * 10 + [3, 4])
    for num_stages in (2, 3, 4, 5):
        borders = balanced_borders(chain, num_stages, slack=0.3)
        assert len({chain.kinds[k] for k in borders[1:]}) == 1, borders
        assert set(chain.cut_bytes[list(borders[1:])]) == {5}
