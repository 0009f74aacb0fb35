"""Numbers of sorted samples, and searches in a sorted key, are computed row by row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar._jax import eval_jaxpr
from autopar.ir.build import flat_function
from autopar.ir.rewrite.sorted_keys import compute_sorted_numbers
from tests.ir.split.cases import primitives_in

KEYS = jnp.array([3, 0, -2, 3, 7, 1, 0, 258, 3, 4, 4, 1], jnp.int32)
"""-2 is large as an unsigned number, and 258 is 2 in 8 bits."""


def ends(keys, side="left"):
    return jnp.searchsorted(keys[jnp.argsort(keys)], jnp.arange(5, dtype=keys.dtype), side=side)


def carried(keys):
    """Samples come twice each; their numbers, and others, are sorted along."""
    return lax.sort((keys, jnp.repeat(jnp.arange(6), 2), keys * 2), num_keys=1)


KNOWN = {
    "left": (ends, "scan"),
    "right": (lambda keys: ends(keys, "right"), "scan"),
    "of a sort": (lambda keys: jnp.searchsorted(jnp.sort(keys), jnp.arange(3) + 1), "scan"),
    "narrow": (lambda keys: ends(keys.astype(jnp.int8)), "scan"),
    "unsigned": (lambda keys: ends(keys.astype(jnp.uint32)), "scan"),
    "narrowed": (
        lambda keys: jnp.searchsorted(jnp.sort(keys.astype(jnp.int8).astype(jnp.int32)), jnp.arange(5)),
        "scan",
    ),
    "in a loop": (lambda keys: lax.scan(lambda c, x: (c, ends(keys + x)), 0, jnp.arange(3))[1], ""),
    "taken": (lambda keys: jnp.repeat(jnp.arange(6), 2)[jnp.argsort(keys)], "gather"),
    "carried": (carried, ""),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_same_numbers(name):
    function, gone = KNOWN[name]
    flat = flat_function(function, KEYS.aval)
    made = compute_sorted_numbers(flat)
    found = eval_jaxpr(made, (), KEYS)
    jax.tree.map(np.testing.assert_array_equal, found, jax.tree.leaves(function(KEYS)))
    assert not primitives_in(made.eqns)[gone]


UNKNOWN = {
    "not sorted": lambda keys: (jnp.argsort(keys), jnp.searchsorted(keys, jnp.arange(5))),
    "unknown numbers": lambda keys: jnp.searchsorted(jnp.sort(keys), keys),
    "floats": lambda keys: jnp.searchsorted(jnp.sort(keys * 0.5), jnp.arange(5.0)),
    "another loop": lambda keys: lax.fori_loop(0, 5, lambda k, x: x + jnp.sort(keys)[k], 0),
    "other numbers": lambda keys: jnp.tile(jnp.arange(6), 2)[jnp.argsort(keys)],
    "narrow numbers": lambda keys: jnp.repeat(jnp.arange(6), 2).astype(jnp.int8)[jnp.argsort(keys)],
    "sorted by others": lambda keys: jnp.searchsorted(
        keys.astype(jnp.int8)[jnp.argsort(keys)], jnp.arange(5, dtype=jnp.int8)
    ),
    "another order": lambda keys: jnp.repeat(jnp.arange(12), 2)[jnp.argsort(keys)],
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_stays(name):
    flat = flat_function(UNKNOWN[name], KEYS.aval)
    before, after = primitives_in(flat.eqns), primitives_in(compute_sorted_numbers(flat).eqns)
    assert before == after
