"""Loops that read a stack by the number of the trip are scans over it; the values are the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.ir.region import bodies_of, region_of
from autopar.ir.split.layers.layers import layer_count
from tests.ir.traced import split_microbatches, traced

LAYERS, WIDTH, BATCH = 6, 8, 4
RNG = np.random.default_rng(0)
KERNELS = (RNG.normal(size=(LAYERS, WIDTH, WIDTH)) / 3).astype(np.float32)
X = RNG.normal(size=(BATCH, WIDTH)).astype(np.float32)


def layer(x, kernel):
    return x + jnp.tanh(x @ kernel)


def trained(run):
    return lambda kernels, x: jax.value_and_grad(lambda kernels: (run(kernels, x) ** 2).mean())(kernels)


def primitives_in(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for body in bodies_of(eqn):
            yield from primitives_in(body)


def scans(jaxpr):
    return [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]


def reading_twice(kernels, x):
    return lax.fori_loop(0, LAYERS, lambda i, x: layer(x, kernels[i] @ kernels[i].T), x)


SCANNED = {
    "fori_loop": lambda w, x: lax.fori_loop(0, LAYERS, lambda i, x: layer(x, w[i]), x),
    "scan over numbers": lambda w, x: lax.scan(lambda x, i: (layer(x, w[i]), None), x, jnp.arange(LAYERS))[0],
    "backwards": lambda w, x: lax.scan(lambda x, i: (layer(x, w[i]), None), x, jnp.arange(LAYERS), reverse=True)[0],
    "dynamic_index_in_dim": lambda w, x: lax.fori_loop(
        0, LAYERS, lambda i, x: layer(x, lax.dynamic_index_in_dim(w, i, keepdims=False)), x
    ),
    "checkpointed": lambda w, x: lax.scan(jax.checkpoint(lambda x, i: (layer(x, w[i]), None)), x, jnp.arange(LAYERS))[
        0
    ],
}


@pytest.mark.parametrize("name", SCANNED)
def test_layers_by_number_are_scanned(name):
    jaxpr = traced(trained(SCANNED[name]), KERNELS, X)
    assert not {"dynamic_slice", "dynamic_update_slice"} & set(primitives_in(jaxpr))
    plain = traced(trained(lambda w, x: lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]), KERNELS, X)
    assert layer_count(jaxpr, (0,), {}) == LAYERS
    of_scans = [[len(region_of(eqn).xs) for eqn in scans(j)] for j in (jaxpr, plain)]
    assert of_scans[0] == of_scans[1] or name == "checkpointed"


def test_loops_in_loops():
    def fn(w, x):
        return lax.scan(lambda x, _: (SCANNED["fori_loop"](w, x), None), x, None, length=2)[0]

    assert "dynamic_slice" not in set(primitives_in(traced(fn, KERNELS, X)))
    traced(trained(fn), KERNELS, X)


def test_what_is_read_twice_is_scanned_once():
    jaxpr = traced(reading_twice, KERNELS, X)
    (scan,) = scans(jaxpr)
    assert len(region_of(scan).xs) == 1 and not region_of(scan).consts


OTHERS = {
    "the next layer": lambda w, x: lax.fori_loop(0, LAYERS, lambda i, x: layer(x, w[i + 1]), x),
    "from the second layer": lambda w, x: lax.fori_loop(1, LAYERS, lambda i, x: layer(x, w[i]), x),
    "some layers": lambda w, x: lax.fori_loop(0, LAYERS - 1, lambda i, x: layer(x, w[i]), x),
    "from the last": lambda w, x: lax.fori_loop(0, LAYERS, lambda i, x: layer(x, w[LAYERS - 1 - i]), x),
    "two at a time": lambda w, x: lax.fori_loop(
        0, LAYERS, lambda i, x: layer(x, lax.dynamic_slice_in_dim(w, i, 2).sum(0)), x
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_rows_are_read_by_number(name):
    jaxpr = traced(trained(OTHERS[name]), KERNELS, X)
    assert "dynamic_slice" in set(primitives_in(jaxpr))


def test_a_sum_that_is_read_on_its_way_stays():
    def fn(w, x):
        def body(total, i):
            total = total + lax.dynamic_update_slice(jnp.zeros_like(w), jnp.tanh(w[i])[None], (i, 0, 0))
            return total, total.sum()

        return lax.scan(body, w, jnp.arange(LAYERS))

    assert "dynamic_update_slice" in set(primitives_in(traced(fn, KERNELS, X)))


def test_a_sum_that_does_not_begin_with_zeros():
    def fn(w, x):
        def body(total, i):
            return total + lax.dynamic_update_slice(jnp.zeros_like(w), jnp.tanh(w[i])[None], (i, 0, 0)), None

        return lax.scan(body, w, jnp.arange(LAYERS))[0]

    assert "dynamic_update_slice" not in set(primitives_in(traced(fn, KERNELS, X)))


def test_gradients_accumulated_by_number():
    """A loop over groups of samples, each read by its number, is one over samples: it goes in microbatches."""

    def step(kernel, x):
        groups = x.reshape(BATCH, -1, 2)
        zero = jnp.zeros(()), jnp.zeros_like(kernel)
        value = jax.value_and_grad(lambda kernel, x: (jnp.tanh(x @ kernel) ** 2).mean())
        loss, grads = lax.fori_loop(
            0, BATCH, lambda i, sums: jax.tree.map(jnp.add, sums, value(kernel, groups[i])), zero
        )
        return kernel - 0.1 * grads / BATCH, loss / BATCH

    args = KERNELS[0, :2], RNG.normal(size=(3 * BATCH, 2)).astype(np.float32)
    split = split_microbatches(traced(step, *args), 2, (1,))
    assert [eqn.params["length"] for eqn in split.loop.eqns if eqn.primitive.name == "scan"] == [BATCH // 2]


BLOCK = 3
BLOCKS = {
    "all": (0, lambda i: i * BLOCK),
    "after the first": (1, lambda i: i * BLOCK),
    "all but the last": (0, lambda i: (i + 1) * BLOCK - BLOCK),
}


def accumulated(first, begin, count=BATCH):
    """Gradients summed over blocks of a batch, those before `first` taken before the loop."""

    def step(kernel, x):
        value = jax.value_and_grad(lambda kernel, x: (jnp.tanh(x @ kernel) ** 2).mean())
        sums = jnp.zeros(()), jnp.zeros_like(kernel)
        if first:
            sums = value(kernel, x[: first * BLOCK])

        def add(i, sums):
            return jax.tree.map(jnp.add, sums, value(kernel, lax.dynamic_slice_in_dim(x, begin(i), BLOCK)))

        return lax.fori_loop(first, count, add, sums)

    return step


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_by_number_are_scanned(name):
    args = KERNELS[0, :2], RNG.normal(size=(BLOCK * BATCH, 2)).astype(np.float32)
    step = accumulated(*BLOCKS[name], count=BATCH - (name == "all but the last"))
    jaxpr = traced(step, *args)  # which compares the results, too
    assert "dynamic_slice" not in set(primitives_in(jaxpr))


def test_blocks_that_begin_in_a_known_stack():
    def fn(w, x):
        return lax.scan(
            lambda s, i: (s + jnp.tanh(lax.dynamic_slice_in_dim(w, i, 2)).sum(), None), 0.0, jnp.arange(0, LAYERS, 2)
        )[0]

    assert "dynamic_slice" not in set(primitives_in(traced(fn, KERNELS, X)))


@pytest.mark.parametrize(
    "begin", [lambda i: i * 2, lambda i: (i + 1) * BLOCK, lambda i: i * i], ids=["lapping", "beyond", "square"]
)
def test_other_blocks_are_read_by_number(begin):
    args = KERNELS[0, :2], RNG.normal(size=(BLOCK * BATCH, 2)).astype(np.float32)
    assert "dynamic_slice" in set(primitives_in(traced(accumulated(0, begin), *args)))


@pytest.mark.parametrize(("first", "count", "left"), [(0, 2, [BATCH // 2]), (1, BATCH, [])])
def test_gradients_accumulated_by_blocks(first, count, left):
    """Microbatches share the trips of the loop, of which the first block is one, too, that big_vision takes apart."""
    args = KERNELS[0, :2], RNG.normal(size=(BLOCK * BATCH, 2)).astype(np.float32)
    split = split_microbatches(traced(accumulated(first, lambda i: i * BLOCK), *args), count, (1,))
    assert [eqn.params["length"] for eqn in scans(split.loop)] == left  # of one trip, no loop is left
