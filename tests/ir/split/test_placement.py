"""How much a shard has of a length, and of a value."""

import jax
import jax.numpy as jnp
import pytest

from autopar._jax import shaped
from autopar.ir.split.placement import BY_EACH, OWN, REPLICATED, SUM, Axis, Partial, Split, local_aval, units_of_shard


@pytest.mark.parametrize("count, units", [(1, 5), (2, 4), (3, 7), (5, 5), (4, 6)])
def test_shares_are_all_there_is_and_even(count, units):
    shares = [units_of_shard(k, count, units) for k in range(count)]
    assert [unit for s in shares for unit in range(s.first, s.first + s.size)] == list(range(units))
    sizes = [s.size for s in shares]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    "placement, units, size, shape",
    [
        (Split(1), 4, 1, (6, 2)),
        (Split(1, blocks=2), 4, 1, (6, 2)),
        (Split(0), 3, 2, (4, 8)),
        (SUM, 4, 1, (6, 8)),
        (BY_EACH, 4, 1, (6, 8)),
    ],
)
def test_type_of_a_shard(placement, units, size, shape):
    aval = shaped(jax.ShapeDtypeStruct((6, 8), jnp.float32))
    assert local_aval(aval, placement, units, size).shape == shape


def test_axes():
    assert Axis(3).is_even and Axis(3).units == 3
    assert not Axis(3, 7).is_even and Axis(3, 7).units == 7


def test_in_words():
    texts = [str(p) for p in (REPLICATED, BY_EACH, OWN, Split(2), Split(0, 3), SUM, Partial("max"))]
    assert texts == [
        "whole",
        "made whole by each",
        "of each its own",
        "split along dim 2",
        "split along dim 0 in 3 blocks",
        "partial sum",
        "partial max",
    ]
