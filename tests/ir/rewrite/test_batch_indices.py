"""Indices that count become batching dims: which do, that the values are the same, and what it saves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from autopar.ir.region import bodies_of
from tests.ir.traced import traced

ROWS, LENGTH, WIDTH = 8, 4, 16
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
IDS = np.array([2, 0, -1, 3, 9, 1, 1, -7], np.int32)
"""Negative, and beyond the length."""
TABLE = RNG.integers(0, WIDTH, (ROWS, LENGTH)).astype(np.int32)


def indexed(eqns):
    """(table's, indices') batching dims of each gather and scatter, those of bodies too."""
    for eqn in eqns:
        numbers = eqn.params.get("dimension_numbers")
        if eqn.primitive.name == "gather":
            yield numbers.operand_batching_dims, numbers.start_indices_batching_dims
        elif "scatter" in eqn.primitive.name:
            yield numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
        for body in bodies_of(eqn):
            yield from indexed(body.eqns)


def batching(fn, *args):
    return list(indexed(traced(fn, *args, rtol=1e-6).eqns))


def scanned(x, ids):
    """The forward pass hands the indices over to the backward pass, whose loop has them as constants."""

    def body(h, _):
        return jnp.tanh(h + h[jnp.arange(ROWS), ids][:, None]), None

    return jax.grad(lambda x: lax.scan(body, x, None, length=2)[0].sum())(x)


def recomputed(x, ids):
    return jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(x[jnp.arange(ROWS), ids]).sum())(x))(x)


BATCHING = {
    "rows": (lambda x, i: x[jnp.arange(ROWS), i], [((0,), (0,))]),
    "a constant": (lambda x, i: x[np.arange(ROWS), i], [((0,), (0,))]),
    "short integers": (lambda x, i: x[jnp.arange(ROWS, dtype=jnp.int8), i.astype(jnp.int8)], [((0,), (0,))]),
    "second": (lambda x, i: x[i[:LENGTH], jnp.arange(LENGTH)], [((1,), (0,))]),
    "rows and columns": (
        lambda x, _: x[jnp.arange(ROWS)[:, None], jnp.arange(LENGTH), jnp.asarray(TABLE)],
        [((0, 1), (0, 1))],
    ),
    "columns of all rows": (lambda x, i: x[:, jnp.arange(LENGTH), i[:LENGTH]], [((1,), (0,))]),
    "add": (lambda x, i: x.at[jnp.arange(ROWS), i].add(1.0), [((0,), (0,))]),
    "set": (lambda x, i: x.at[jnp.arange(ROWS), i].set(7.0), [((0,), (0,))]),
    "clipped": (lambda x, i: x.at[jnp.arange(ROWS), i].get(mode="clip"), [((0,), (0,))]),
    "gradient": (jax.grad(lambda x, i: jnp.sin(x[jnp.arange(ROWS), i]).sum()), [((0,), (0,))] * 2),
    "diagonal": (lambda x, _: x[jnp.arange(LENGTH), jnp.arange(LENGTH)], [((1,), (0,))]),
    "scanned": (scanned, [((0,), (0,))] * 2),
    "recomputed": (recomputed, [((0,), (0,))] * 2),
}


@pytest.mark.parametrize("name", BATCHING)
def test_what_counts(name):
    fn, expected = BATCHING[name]
    found = batching(fn, X, IDS)
    assert found == expected


OTHERS = {
    "shifted": lambda x, i: x[jnp.arange(ROWS) - 1, i],
    "backwards": lambda x, i: x[jnp.arange(ROWS)[::-1], i],
    "a constant that does not count": lambda x, i: x[np.arange(ROWS) ** 2 % ROWS, i],
    "some rows": lambda x, i: x[jnp.arange(LENGTH), i[:LENGTH]],
    "wrapped": lambda x, i: x[jnp.arange(ROWS, dtype=jnp.uint8).astype(jnp.int32) * 2 % ROWS, i],
    "numbers of the samples that are data": lambda x, i: x[i, i],
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_does_not(name):
    assert batching(OTHERS[name], X, IDS) == [((), ())]


def test_an_overflow_does_not_count():
    x = RNG.normal(size=(300, 2)).astype(np.float32)
    found = batching(lambda x, i: x[jnp.arange(300).astype(jnp.uint8), i], x, np.zeros(300, np.int32))
    assert found == [((), ())]


def q_learning(params, x, actions, returns):
    def loss(params):
        return jnp.mean(((x @ params)[jnp.arange(x.shape[0]), actions] - returns) ** 2)

    value, grad = jax.value_and_grad(loss)(params)
    return params - 0.1 * grad, value


def test_rows_are_sharded_as_the_batch():
    """Gradient and loss are reduced, in one: no communication for the indices."""
    args = (X[0], X.reshape(-1, LENGTH), np.arange(ROWS * WIDTH, dtype=np.int32) % WIDTH, X[:, 0].reshape(-1))
    step = autopar.parallelize(q_learning, method=autopar.DataParallel(), batch_argnums=(1, 2, 3), donate_argnums=())
    assert [c.bytes for c in step.plan(*args).cost.collectives] == [4 + 4 * LENGTH * WIDTH]
    for got, want in zip(step(*args), jax.jit(q_learning)(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
