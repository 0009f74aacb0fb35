"""A loop that adds up gradients is taken apart where its trips are the microbatches; the values are the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.ir.check import check_program
from autopar.ir.gradient import is_backward
from autopar.ir.region import equations_within, kind_of, trip_count
from autopar.ir.rewrite.trips_at_once import trips_at_once
from autopar.ir.split.rounds.steps import holds_steps
from tests.ir.traced import evaluate, split_microbatches, traced

TRIPS, LAYERS, WIDTH, ROWS = 4, 3, 8, 2
RNG = np.random.default_rng(0)
KERNELS = (RNG.normal(size=(LAYERS, WIDTH, WIDTH)) / 3).astype(np.float32)
X = RNG.normal(size=(TRIPS * ROWS, WIDTH)).astype(np.float32)


def loss(kernels, x, key=None):
    if key is not None:
        x = x * jax.random.bernoulli(key, 0.8, x.shape)
    x, _ = lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, kernels)
    return (x**2).mean() / (1 + jnp.abs(x).sum())  # trips are parts of their own: no sample is split off


VALUE = jax.value_and_grad(loss)


def zeros(kernels):
    return 0.0, jnp.zeros_like(kernels)


def added(sums, more):
    return jax.tree.map(jnp.add, sums, more)


def over_rows(kernels, x):
    return lax.scan(lambda s, x: (added(s, VALUE(kernels, x)), x[0]), zeros(kernels), x.reshape(TRIPS, ROWS, -1))


def over_blocks(kernels, x):
    def part(i):
        return lax.dynamic_slice_in_dim(x, i * ROWS, ROWS)

    return lax.fori_loop(0, TRIPS, lambda i, s: added(s, VALUE(kernels, part(i))), VALUE(kernels, x[:ROWS]))


def with_keys(kernels, x):
    def trip(carry, x):
        sums, number = carry
        key = jax.random.fold_in(jax.random.key(0), number)
        return (added(sums, VALUE(kernels, x, key)), number + 1), None

    return lax.scan(trip, (zeros(kernels), 5), x.reshape(TRIPS, ROWS, -1), reverse=False)


def with_a_clock(kernels, x):
    """A number that is no integer, which each trip reads."""

    def trip(carry, x):
        sums, time = carry
        value, grads = VALUE(kernels, x)
        return (added(sums, (value * time, grads)), time + 0.5), time

    return lax.scan(trip, (zeros(kernels), 0.25), x.reshape(TRIPS, ROWS, -1))


def with_a_key_split_by_each_trip(kernels, x):
    """The key goes on by itself, against the order of the rows."""

    def trip(carry, x):
        sums, key = carry
        key, own = jax.random.split(key)
        return (added(sums, VALUE(kernels, x, own)), key), own

    return lax.scan(trip, (zeros(kernels), jax.random.PRNGKey(0)), x.reshape(TRIPS, ROWS, -1), reverse=True)


def with_statistics(kernels, x):
    """No gradient waits for the largest loss and the running mean, which one trip hands to the next."""

    def trip(carry, x):
        sums, most, mean, number = carry
        value, grads = VALUE(kernels, x)
        mean = 0.9 * mean + 0.1 * number * x.mean(0)
        return (added(sums, (value, grads)), jnp.maximum(most, value), mean, number + 1), (most, value)

    return lax.scan(trip, (zeros(kernels), -jnp.inf, jnp.zeros(WIDTH), 1), x.reshape(TRIPS, ROWS, -1))


def read_on_its_way(kernels, x):
    return lax.scan(
        lambda s, x: (added(s, VALUE(kernels, x)), s[1][0, 0, 0] * 0),
        zeros(kernels),
        x.reshape(TRIPS, ROWS, -1),
        reverse=True,
    )


def with_what_the_trip_before_saw(kernels, x):
    def trip(carry, x):
        sums, before = carry
        return (added(sums, VALUE(kernels, x + before)), x), None

    return lax.scan(trip, (zeros(kernels), jnp.zeros((ROWS, WIDTH))), x.reshape(TRIPS, ROWS, -1))


def running_mean(kernels, x):
    def trip(mean, i):
        part = lax.dynamic_slice_in_dim(x, i * ROWS, ROWS)
        return jax.tree.map(lambda m, g: m + (g - m) / (i + 1), mean, VALUE(kernels, part)), None

    return lax.scan(trip, (7.0, jnp.ones_like(kernels)), jnp.arange(TRIPS))[0]


def begun_by_the_first_trip(kernels, x):
    """As T5X adds up metrics: the first trip does not read what the loop begins with."""

    def trip(i, carry):
        grads, metrics = carry
        value, more = VALUE(kernels, lax.dynamic_slice_in_dim(x, i * ROWS, ROWS))
        new = {"loss": value, "weight": jnp.float32(ROWS)}
        metrics = lax.cond(i == 0, lambda: new, lambda: added(new, metrics))
        return grads + more, metrics

    return lax.fori_loop(0, TRIPS, trip, (jnp.zeros_like(kernels), {"loss": jnp.inf, "weight": jnp.nan}))


def fading_difference(kernels, x):
    return lax.scan(
        lambda s, x: (jax.tree.map(lambda s, g: 0.9 * s - g, s, VALUE(kernels, x)), None),
        (1.0, jnp.ones_like(kernels)),
        x.reshape(TRIPS, ROWS, -1),
        reverse=True,
    )[0]


def descent(kernels, x):
    return lax.scan(lambda w, x: (w - VALUE(w, x)[1], None), kernels, x.reshape(TRIPS, ROWS, -1))


def largest(kernels, x):
    return lax.scan(
        lambda s, x: (jax.tree.map(jnp.maximum, s, VALUE(kernels, x)), None), zeros(kernels), x.reshape(TRIPS, ROWS, -1)
    )


@pytest.mark.parametrize(
    "step",
    [
        over_rows,
        over_blocks,
        with_keys,
        with_a_clock,
        with_a_key_split_by_each_trip,
        with_statistics,
        running_mean,
        fading_difference,
        begun_by_the_first_trip,
    ],
)
def test_trips_stand_in_the_program(step):
    jaxpr = traced(step, KERNELS, X)
    made = trips_at_once(jaxpr, TRIPS)
    check_program(made)
    assert LAYERS in {trip_count(eqn) for eqn in made.eqns if kind_of(eqn) == "scan"}
    assert not any(map(holds_steps, made.eqns))
    assert any(map(is_backward, made.eqns))
    for actual, expected in zip(evaluate(made, KERNELS, X), jax.tree.leaves(jax.jit(step)(KERNELS, X)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-6)
        assert actual.dtype == expected.dtype


@pytest.mark.parametrize("step", [read_on_its_way, with_what_the_trip_before_saw, descent, largest])
def test_loops_that_do_more_than_add_stay(step):
    jaxpr = traced(step, KERNELS, X)
    assert trips_at_once(jaxpr, TRIPS).eqns[-1].primitive.name == jaxpr.eqns[-1].primitive.name
    assert TRIPS in {trip_count(eqn) for eqn in trips_at_once(jaxpr, TRIPS).eqns if kind_of(eqn) == "scan"}


def test_other_numbers_of_trips_stay():
    jaxpr = traced(over_rows, KERNELS, X)
    assert trips_at_once(jaxpr, 2) is jaxpr


def test_each_microbatch_is_a_trip():
    """A trip is not split, so that it may need all of its samples; and its layers are loops of the microbatch."""
    jaxpr = trips_at_once(traced(lambda w, x: over_rows(w, x)[0], KERNELS, X), TRIPS)
    split = split_microbatches(jaxpr, TRIPS, (1,))
    loops = [eqn for eqn, _ in equations_within(split.loop) if kind_of(eqn) == "scan"]
    assert [trip_count(eqn) for eqn in loops] == [LAYERS, LAYERS]
