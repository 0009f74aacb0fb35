"""A trip that stands before or behind a loop that adds up gradients becomes one of its trips; the values are the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.ir.gradient import is_backward
from autopar.ir.region import trip_count
from autopar.ir.rewrite.trips_at_once import own_microbatches
from autopar.ir.split.rounds.steps import holds_steps
from tests.ir.traced import traced

TRIPS, LAYERS, WIDTH, ROWS = 4, 3, 8, 2
RNG = np.random.default_rng(0)
KERNELS = (RNG.normal(size=(LAYERS, WIDTH, WIDTH)) / 3).astype(np.float32)
X = RNG.normal(size=(TRIPS * ROWS, WIDTH)).astype(np.float32)
KEY = jax.random.PRNGKey(0)
MORE = jax.tree_util.Partial(jax.tree.map, jnp.add)


def loss(kernels, x, key=None):
    if key is not None:
        x = x * jax.random.bernoulli(key, 0.8, x.shape)
    x, _ = lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, kernels)
    return (x**2).mean()


VALUE = jax.value_and_grad(loss)


def zeros(kernels):
    return 0.0, jnp.zeros_like(kernels)


def stacked(x):
    return x.reshape(TRIPS, ROWS, WIDTH)


def blocks(kernels, x):
    """As big_vision accumulates gradients."""

    def part(i):
        return lax.dynamic_slice(x, (i * ROWS, 0), (ROWS, WIDTH))

    return lax.fori_loop(1, TRIPS, lambda i, s: MORE(s, VALUE(kernels, part(i))), VALUE(kernels, x[:ROWS]))


def numbered_keys(kernels, x):
    def of(i):
        return VALUE(kernels, lax.dynamic_index_in_dim(stacked(x), i, 0, False), jax.random.fold_in(KEY, i))

    return lax.fori_loop(1, TRIPS, lambda i, s: MORE(s, of(i)), of(0))


def rows_and_their_keys(kernels, x):
    x, keys = stacked(x), jax.random.split(KEY, TRIPS)
    first = VALUE(kernels, x[0], keys[0])
    return lax.scan(lambda s, row: (MORE(s, VALUE(kernels, *row)), None), first, (x[1:], keys[1:]))[0]


def a_key_split_by_each_trip(kernels, x):
    def trip(i, key):
        key, own = jax.random.split(key)
        return VALUE(kernels, lax.dynamic_slice_in_dim(x, i * ROWS, ROWS), own), key

    def more(i, carry):
        sums, key = carry
        value, key = trip(i, key)
        return MORE(sums, value), key

    return lax.fori_loop(1, TRIPS, more, trip(0, KEY))


def over_numbers(kernels, x):
    def of(i):
        return VALUE(kernels, lax.dynamic_slice_in_dim(x, i * ROWS, ROWS))

    return lax.scan(lambda s, i: (MORE(s, of(i)), i), of(0), jnp.arange(1, TRIPS))


def last_behind(kernels, x):
    x = stacked(x)
    sums, losses = lax.scan(lambda s, x: (MORE(s, v := VALUE(kernels, x)), v[0]), zeros(kernels), x[:-1])
    return MORE(sums, VALUE(kernels, x[-1])), losses


@pytest.mark.parametrize(
    "step",
    [blocks, numbered_keys, rows_and_their_keys, a_key_split_by_each_trip, over_numbers, last_behind],
)
def test_the_trip_is_one_of_the_loop(step):
    jaxpr = traced(step, KERNELS, X)
    assert [trip_count(eqn) for eqn in jaxpr.eqns if holds_steps(eqn)] == [TRIPS]
    assert not any(map(is_backward, jaxpr.eqns))
    assert own_microbatches(jaxpr) == TRIPS


def other_rows(kernels, x):
    """The first gradient is that of rows which the loop does not go on from."""
    return lax.fori_loop(
        1,
        TRIPS,
        lambda i, s: MORE(s, VALUE(kernels, lax.dynamic_slice_in_dim(x, i * ROWS, ROWS))),
        VALUE(kernels, x[1:3]),
    )


def another_loss(kernels, x):
    x = stacked(x)
    first = jax.value_and_grad(lambda k: 2 * loss(k, x[0]))(kernels)
    return lax.scan(lambda s, x: (MORE(s, VALUE(kernels, x)), None), first, x[1:])[0]


def read_elsewhere(kernels, x):
    """The norm of the first gradient is a result of its own."""
    first = VALUE(kernels, x[:ROWS])
    sums = lax.fori_loop(
        1, TRIPS, lambda i, s: MORE(s, VALUE(kernels, lax.dynamic_slice_in_dim(x, i * ROWS, ROWS))), first
    )
    return sums, jnp.linalg.norm(first[1])


def a_key_of_its_own(kernels, x):
    keys, x = jax.random.split(KEY, TRIPS), stacked(x)
    first = VALUE(kernels, x[0], jax.random.PRNGKey(7))
    return lax.scan(lambda s, row: (MORE(s, VALUE(kernels, *row)), None), first, (x[1:], keys[1:]))[0]


@pytest.mark.parametrize("step", [other_rows, another_loss, read_elsewhere, a_key_of_its_own])
def test_other_work_before_a_loop_stays(step):
    jaxpr = traced(step, KERNELS, X)
    assert [trip_count(eqn) for eqn in jaxpr.eqns if holds_steps(eqn)] == [TRIPS - 1]
    assert any(map(is_backward, jaxpr.eqns))


def test_values_with_many_readers_are_compared_once():
    """Forty residual layers, each read twice: a comparison along each path would not end."""

    def deep(kernel, x):
        for _ in range(40):
            x = x + jnp.tanh(x @ kernel)
        return (x**2).mean()

    def step(kernel, x):
        def add(total, rows):
            return total + jax.grad(deep)(kernel, rows), None

        return lax.scan(add, jax.grad(deep)(kernel, stacked(x)[0]), stacked(x)[1:])[0]

    (loop,) = [eqn for eqn in traced(step, KERNELS[0], X).eqns if holds_steps(eqn)]
    assert trip_count(loop) == TRIPS
