"""Which equations count how many rows have each value of a key."""

import jax
import jax.numpy as jnp
import pytest

from autopar._jax import Jaxpr
from autopar.ir.split.sorted_rows.counted import Sums, summed
from autopar.ir.split.sorted_rows.ordered import Ordering
from autopar.ir.trace.trace import trace_step

ROWS, GROUPS, PARTS = 8, 3, 2


def found(jaxpr: Jaxpr) -> list[Sums]:
    """What sums and scattered sums of a program that sorts rows add up of a key."""
    ordering = Ordering(jaxpr, PARTS)
    sums = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in ("scatter-add", "reduce_sum")]
    each = [summed(eqn, ordering.values, ordering.key_of, PARTS) for eqn in sums]
    return [count for count in each if count is not None]


def counts(of, dtype=jnp.uint32):
    """A program that sorts by a key, and counts something of it."""
    key = jax.ShapeDtypeStruct((ROWS,), dtype)
    return found(trace_step(lambda key: (jnp.argsort(key), of(key)), [key]).jaxpr)


def one_hot(key, dtype=jnp.int32):
    return (key[:, None] == jnp.arange(GROUPS, dtype=key.dtype)).sum(0, dtype=dtype)


def test_ones_that_are_scattered_by_the_key():
    """Zeros are whole, places and ones come in parts."""
    assert counts(lambda key: jnp.bincount(key, length=GROUPS)) == [Sums(0, True, (None, 0, 0))]


def test_a_sum_of_what_equals_each_number():
    assert counts(one_hot) == [Sums(0, True, (0,))]


@pytest.mark.parametrize(
    "of",
    [
        lambda key: jnp.bincount(key % 2, length=GROUPS),  # sorted by the key, these are not
        lambda key: jnp.bincount(key, weights=jnp.arange(ROWS), length=GROUPS),
        lambda key: one_hot(jnp.flip(key)),
        lambda key: one_hot(key, jnp.int16),
    ],
    ids=["of a remainder", "weighed", "of rows in another order", "in 16 bits"],
)
def test_what_does_not_count_the_key(of):
    assert counts(of) == []


def test_numbers_that_may_be_negative_count_no_groups():
    """Rows of no group would stand before those of the first."""
    assert counts(one_hot, jnp.int32) == [Sums(0, False, (0,))]
