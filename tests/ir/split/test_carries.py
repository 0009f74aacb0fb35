"""What loops carry: which carries are sums, and which loops end for each sample by itself."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar.ir.build import flat_function
from autopar.ir.region import is_region, region_of
from autopar.ir.split.carries import is_done_apart, sum_carries

XS = jax.ShapeDtypeStruct((5, 4), jnp.float32)
X = jax.ShapeDtypeStruct((4,), jnp.float32)


def loop_in(function, *types):
    (region,) = (region_of(eqn) for eqn in flat_function(function, *types).eqns if is_region(eqn))
    return region


def scanned(trip):
    return loop_in(lambda x, xs: lax.scan(trip, (x, x * 2), xs), X, XS)


CARRIES = {
    "a sum": (lambda c, x: ((c[0] + x * c[1], c[1]), None), [True]),
    "two sums": (lambda c, x: ((c[0] + x, c[1] + 2 * x), None), [True, True]),
    "a sum in two steps": (lambda c, x: ((c[0] + x + jnp.sin(x), c[1]), None), [True]),
    "a product": (lambda c, x: ((c[0] * x, c[1]), None), [None]),
    "a sum that is stacked": (lambda c, x: ((c[0] + x, c[1]), c[0]), [None]),
    "a sum that is added to itself": (lambda c, x: ((c[0] + c[0], c[1]), None), [None]),
    "a sum beside what is no sum": (lambda c, x: ((c[0] + x * c[1], jnp.sin(c[1] + x)), None), [True, None]),
    "a sum that another reads": (lambda c, x: ((c[0] + x, jnp.sin(c[0] + c[1])), None), [None, None]),
    "changed about": (lambda c, x: ((c[1], c[0] + x), None), [None, None]),
}


@pytest.mark.parametrize("name", CARRIES)
def test_sums(name):
    trip, kinds = CARRIES[name]
    assert sum_carries(scanned(trip)) == kinds


def test_each_sample_by_itself():
    one = jax.vmap(lambda x: lax.while_loop(lambda v: v < 10.0, lambda v: v * 2 + 1, x))
    assert is_done_apart(loop_in(one, X))


def test_all_samples_as_long_as_one_goes_on():
    together = loop_in(lambda x: lax.while_loop(lambda v: (v < 10.0).any(), lambda v: v * 2 + 1, x), X)
    assert not is_done_apart(together)
