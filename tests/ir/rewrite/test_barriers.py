"""Barriers hold back what has to wait, and nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.ir.region import bodies_of, kind_of, region_of
from autopar.ir.rewrite.barriers import drop_barriers
from tests.ir.traced import evaluate, traced

LAYERS, WIDTH = 4, 8
RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, WIDTH)).astype(np.float32)


def stacked(layers=LAYERS):
    return (RNG.normal(size=(layers, WIDTH, WIDTH)) / 3).astype(np.float32)


def scanned(*blocks):
    """Layers of these blocks in a scan; each gets the row of the stack and what all layers share."""

    def loss(stack, shared, x):
        def layer(x, w):
            for block in blocks:
                x = block(x, w, shared)
            return x, None

        return (jax.lax.scan(layer, x, stack)[0] ** 2).mean()

    return jax.value_and_grad(loss, argnums=(0, 1))


def block(x, w, _):
    return x + jnp.tanh(x @ w)


def shared_block(x, w, shared):
    return x + jnp.tanh(x @ (w * shared))


def barriers_in(jaxpr):
    """Barriers, with the loops' variables that enter all trips alike."""
    for eqn in jaxpr.eqns:
        if kind_of(eqn) == "barrier":
            yield eqn
        for body in bodies_of(eqn):
            yield from barriers_in(body)


def rewritten(step, *args):
    """What a step is before and after, which compute the same."""
    before = traced(step, *args)
    after = drop_barriers(before)
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(args)]
    for one, other in zip(evaluate(before, *leaves), evaluate(after, *leaves), strict=True):
        np.testing.assert_array_equal(one, other)
    return before, after


def test_what_a_trip_is_given_need_not_wait():
    before, after = rewritten(scanned(jax.checkpoint(block)), stacked(), np.float32(1), X)
    assert len(list(barriers_in(before))) == 1 and not list(barriers_in(after))
    assert drop_barriers(after) is after, "there is nothing more to do"


def test_what_enters_all_trips_alike_stays_behind():
    before, after = rewritten(scanned(jax.checkpoint(shared_block)), stacked(), np.float32(2), X)
    (wide,), (narrow,) = barriers_in(before), barriers_in(after)
    assert len(wide.invars) > len(narrow.invars) == 1
    (loop,) = (eqn for eqn in after.eqns if any(True for body in bodies_of(eqn) for _ in barriers_in(body)))
    assert narrow.invars[0] in [b.var for b in region_of(loop).consts]


def test_what_waits_for_the_block_behind_it_still_waits():
    before, after = rewritten(scanned(*[jax.checkpoint(block)] * 2), stacked(), np.float32(1), X)
    assert len(list(barriers_in(before))) == 2
    assert list(barriers_in(after)), "the first block would run again before the second one is done"


def test_what_is_read_beside_it_stays_apart():
    """Forward and again in one trip: without the barrier a compiler would make one of the two."""

    def step(stack, x):
        again = jax.checkpoint(lambda w: jnp.tanh(jnp.tanh(x @ w)).sum())
        return jax.lax.scan(lambda total, w: (total + again(w), jax.grad(again)(w)), jnp.float32(0), stack)

    before, after = rewritten(step, stacked(), X)
    assert len(list(barriers_in(before))) == len(list(barriers_in(after))) > 0


def test_one_trip_is_no_loop():
    before, after = rewritten(scanned(jax.checkpoint(block)), stacked(1), np.float32(1), X)
    assert list(barriers_in(before)) and len(list(barriers_in(after))) == len(list(barriers_in(before)))


def test_parameters_do_not_wait_where_layers_are_written_out():
    def step(weights, x):
        def loss(weights):
            h = x
            for w in weights:
                h = jax.checkpoint(block)(h, w.astype(jnp.float32), None)
            return (h**2).mean()

        return jax.value_and_grad(loss)(weights)

    weights = list(stacked())
    before = traced(step, weights, X)
    after = drop_barriers(before, batch=[len(weights)])
    assert len(list(barriers_in(before))) == LAYERS
    given = {*after.invars[:LAYERS]}
    alone = [barrier for barrier in barriers_in(after) if given.issuperset(barrier.invars)]
    assert len(alone) == LAYERS and all(len(barrier.invars) == 1 for barrier in alone)
    others = [barrier for barrier in barriers_in(after) if barrier not in alone]
    assert len(others) == LAYERS and all(given.isdisjoint(barrier.invars) for barrier in others)
    assert any(after.invars[LAYERS] in barrier.invars for barrier in others), (
        "samples wait, or layers would run too early"
    )


@pytest.mark.parametrize("prevent_cse", [True, False])
@pytest.mark.parametrize("scanned", [True, False])
def test_weights_are_gathered_in_16_bits_in_both_passes(scanned, prevent_cse):
    """ZeRO-3 of recomputed layers with 32-bit weights that are computed with in 16 bits. Layers that are written out and wait
    for nothing cast a weight once, as compilers have it: where there is memory, it is gathered once."""
    width, layers, passes = 2048, 8, 2 if scanned or prevent_cse else 1
    optimizer = optax.sgd(1e-3)

    def loss(stack, x):
        def layer(x, w):
            return x + jnp.tanh(x @ w.astype(jnp.bfloat16)), None

        x, layer = x.astype(jnp.bfloat16), jax.checkpoint(layer, prevent_cse=prevent_cse)
        if scanned:
            x, _ = jax.lax.scan(layer, x, stack)
        else:
            for w in stack:
                x, _ = layer(x, w)
        return (x.astype(jnp.float32) ** 2).mean()

    def step(state, x):
        stack, opt_state = state
        value, gradient = jax.value_and_grad(loss)(stack, x)
        updates, opt_state = optimizer.update(gradient, opt_state, stack)
        return (optax.apply_updates(stack, updates), opt_state), value

    weight = jax.ShapeDtypeStruct((width, width), jnp.float32)
    stack = jax.ShapeDtypeStruct((layers, width, width), jnp.float32) if scanned else [weight] * layers
    state = stack, jax.eval_shape(optimizer.init, stack)
    x = jax.ShapeDtypeStruct((4096, width), jnp.float32)
    cluster = autopar.Cluster.of("1x8 h100")
    plan = autopar.parallelize(step, method=autopar.DataParallel(zero=3), cluster=cluster).plan(state, x)
    gathers = [c for c in plan.cost.collectives if c.kind == "all-gather"]
    assert sum(c.bytes * c.times for c in gathers) == passes * layers * width * width * 2


def test_numbers_wait_for_nothing():
    """The gradient of an auxiliary loss and a counter of layers are literals where a loop over layers was written out."""

    def step(w, x):
        w, x, scale = jax.lax.optimization_barrier((w, x, np.float32(0.25)))
        return scale * (w @ x)

    _, after = rewritten(step, stacked(1)[0], X.T)
    assert [len(barrier.invars) for barrier in barriers_in(after)] == [3]
    after = drop_barriers(traced(step, stacked(1)[0], X.T), batch=[1])
    assert [len(barrier.invars) for barrier in barriers_in(after)] == [2, 1]

    def scanned_step(stack, x):
        def layer(x, w):
            w, scale = jax.lax.optimization_barrier((w, np.float32(0.25)))
            return x + scale * jnp.tanh(x @ w), None

        return jax.lax.scan(layer, x, stack)[0]

    before, after = rewritten(scanned_step, stacked(), X)
    assert len(list(barriers_in(before))) == 1 and not list(barriers_in(after))
