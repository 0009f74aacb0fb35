"""What is known of values before a program runs: numbers that count, and those of a loop's trips."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autopar._jax import Atom, Jaxpr
from autopar.ir.build import flat_function
from autopar.ir.known_values import KnownValues
from autopar.ir.region import Region, kind_of, region_of

TRIPS = 6
X = jax.ShapeDtypeStruct((3,), jnp.float32)


def asked(jaxpr: Jaxpr) -> Atom:
    """What the only `neg` of a body reads: the number that is asked about."""
    (eqn,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "neg")
    return eqn.invars[0]


def scan_in(jaxpr: Jaxpr) -> Region:
    (eqn,) = (eqn for eqn in jaxpr.eqns if kind_of(eqn) == "scan")
    return region_of(eqn)


def used(number: Any, x: jax.Array) -> jax.Array:
    return x * (-number).astype(jnp.float32)


def over(numbers: Any) -> Callable[[jax.Array], jax.Array]:
    return lambda x: lax.scan(lambda x, n: (used(n, x), None), x, numbers())[0]


def carried(first: int, step: int, reverse: bool = False) -> Callable[[jax.Array], jax.Array]:
    def trip(carry: tuple[jax.Array, jax.Array], _: None) -> tuple[tuple[jax.Array, jax.Array], None]:
        return (carry[0] + step, used(carry[0], carry[1])), None

    return lambda x: lax.scan(trip, (jnp.int32(first), x), None, length=TRIPS, reverse=reverse)[0][1]


def wrapped(x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, TRIPS, lambda n, x: used(jnp.where(n < 0, n + TRIPS, n), x), x)


NUMBERS = {
    "fori_loop": (lambda x: lax.fori_loop(0, TRIPS, used, x), True),
    "counted by hand": (carried(0, 1), True),
    "counted back": (carried(0, 1, reverse=True), False),
    "begun at one": (carried(1, 1), False),
    "in steps of two": (carried(0, 2), False),
    "scanned": (over(lambda: jnp.arange(TRIPS)), True),
    "scanned, from one": (over(lambda: jnp.arange(1, TRIPS + 1)), False),
    "converted": (over(lambda: jnp.arange(TRIPS).astype(jnp.int8)), True),
    "of a negative index": (wrapped, True),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_number_of_the_trip(name):
    function, is_trip = NUMBERS[name]
    jaxpr = flat_function(function, X)
    scan = scan_in(jaxpr)
    assert KnownValues(jaxpr).is_trip(asked(scan.bodies[0]), scan) is is_trip


def test_number_of_another_loop():
    """Of two loops in each other, of as many trips, each has its own number."""

    def nested(x):
        return lax.fori_loop(0, TRIPS, lambda n, x: lax.fori_loop(0, TRIPS, lambda _, x: used(n, x), x), x)

    jaxpr = flat_function(nested, X)
    inner = scan_in(scan_in(jaxpr).bodies[0])
    known = KnownValues(jaxpr)
    assert not known.is_trip(asked(inner.bodies[0]), inner)


def test_numbers_of_trips_that_were_stacked():
    def stacked(x):
        return -lax.scan(lambda x, n: (x * 2, n), x, jnp.arange(TRIPS))[1], x

    jaxpr = flat_function(stacked, X)
    assert KnownValues(jaxpr).is_count(asked(jaxpr))


@pytest.mark.parametrize(
    "function, number",
    [
        (lambda x: -jnp.full((2, 3), 7.0), 7.0),
        (lambda x: -(jnp.zeros((3, 4)).reshape(12)), 0.0),
        (lambda x: -(jnp.full((2, 3), 1.0) / 4), 0.25),
        (lambda x: -lax.div(jnp.full((2, 3), -7), 2), -3),
        (lambda x: -(x * 0), None),
    ],
)
def test_one_number(function, number):
    jaxpr = flat_function(function, X)
    assert KnownValues(jaxpr).uniform_value(asked(jaxpr)) == number
