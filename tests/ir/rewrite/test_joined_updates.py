"""Elementwise work that updates one array of the state is one operation; the program computes the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar._jax import eval_jaxpr, open_jaxpr
from autopar.ir.check import check_program
from autopar.ir.rewrite.joined_updates import join_updates
from autopar.ir.rules import rule_for
from autopar.ir.signature import equation_signature
from autopar.ir.trace.flatten import flatten
from autopar.mesh import Cluster

WIDTH = 8
ADAM = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, weight_decay=0.1))


def loss_of(layers, x):
    for layer in layers:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean(x**2)


def step_of(optimizer):
    def step(state, x):
        layers, moments = state
        loss, grads = jax.value_and_grad(loss_of)(layers, x)
        updates, moments = optimizer.update(grads, moments, layers)
        return (optax.apply_updates(layers, updates), moments), {"loss": loss, "moved": optax.global_norm(updates)}

    return step


def arguments(optimizer, width=WIDTH):
    draw = np.random.default_rng(0)
    normal = lambda *shape: jnp.float32(draw.normal(size=shape))  # noqa: E731
    layers = [{"w": normal(width, width), "b": normal(width)} for _ in range(2)]
    return (layers, optimizer.init(layers)), normal(16, width)


def joined(fun, *args):
    """The rewritten program of a function, which must compute the same; and the program as it was."""
    flat, consts = flatten(*open_jaxpr(jax.make_jaxpr(fun)(*args)))
    made = join_updates(flat)
    check_program(made)
    results = jax.jit(lambda *args: eval_jaxpr(made, (), *args))(*jax.tree.leaves(args), *consts)
    for got, want in zip(results, jax.tree.leaves(jax.jit(fun)(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)
    return made, flat


def updates_in(jaxpr):
    return [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "update"]


def test_an_array_and_its_moments_are_updated_at_once():
    """Four arrays, each with two moments; a norm of all gradients before, and one of all updates behind."""
    made, flat = joined(step_of(ADAM), *arguments(ADAM))
    found = updates_in(made)
    assert [len(eqn.outvars) for eqn in found] == [4] * 4, "new array, two moments, and the update, whose norm is taken"
    assert len(made.eqns) < len(flat.eqns) - 4 * 15
    assert len({equation_signature(eqn) for eqn in found}) == 2, (
        "the layers' are equal, those of matrices and vectors not"
    )
    assert {str(rule_for(eqn)).partition("->")[2] for eqn in found} == {"ab,ab,ab,ab", "a,a,a,a"}


@pytest.mark.parametrize(
    "optimizer, each",
    [(optax.lamb(1e-2), 2), (optax.adafactor(1e-2), 2), (optax.lion(1e-3), 2), (optax.sgd(0.1), 1)],
    ids=["lamb", "adafactor", "lion", "sgd"],
)
def test_other_optimizers(optimizer, each):
    """What lies on both sides of a reduction over the array, as in LAMB, is two updates; so are results that share nothing."""
    assert len(updates_in(joined(step_of(optimizer), *arguments(optimizer))[0])) == 4 * each


def test_a_scale_that_is_worked_out_between_two_updates():
    """The second array's update reads a maximum of the first one's: neither stands within the other."""

    def step(state, x):
        first, second = jax.grad(lambda state: jnp.sum((x @ state[0] @ state[1]) ** 2))(state)
        first = state[0] - 0.1 * first
        return first, state[1] - second / (1.0 + jnp.max(first)), jnp.max(first)

    matrices = jnp.float32(np.random.default_rng(1).normal(size=(2, WIDTH, WIDTH)))
    assert len(updates_in(joined(step, tuple(matrices), matrices[0])[0])) == 2


@pytest.mark.parametrize(
    "fun",
    [
        lambda state, x: (state * 0.9 + x * 0.1, jnp.tanh(x) * 2.0),  # no gradients
        lambda state, x: jax.grad(lambda w: jnp.sum(jnp.sin(w) * x))(state),  # nothing behind them
        lambda state, x: jax.device_put(
            jax.device_put(state, jax.memory.Space.Device) - 0.1 * jax.grad(lambda w: jnp.sum(jnp.sin(w)))(x),
            jax.memory.Space.Host,
        ),
    ],
)
def test_nothing_to_join(fun):
    flat = flatten(*open_jaxpr(jax.make_jaxpr(fun)(jnp.ones(8), jnp.ones(8))))[0]
    assert join_updates(flat) is flat


def test_devices_update_their_shards():
    args = arguments(ADAM, 16)
    compiled = autopar.parallelize(step_of(ADAM), method=autopar.DataParallel(zero=3)).compile(*args)
    wanted = jax.jit(step_of(ADAM))(*args)
    got = compiled(*jax.tree.map(jnp.copy, args))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, wanted)


def test_an_update_takes_the_memory_of_what_it_replaces():
    """At the peak a matrix, its moments and its gradient are alive, and no results beside them; scalars and a batch aside."""
    state, _ = jax.eval_shape(lambda: arguments(optax.adam(1e-3), 1024))
    x = jax.ShapeDtypeStruct((1, 1024), jnp.float32)
    how = {"cluster": Cluster.of("1x1 h100"), "method": autopar.ShardParallel((1,)), "batch_argnums": (1,)}

    def step(state, x):
        (layers, moments), _ = step_of(optax.adam(1e-3))(state, x)
        return layers, moments

    (peak,) = autopar.parallelize(step, **how).plan(state, x).cost.peak_bytes
    arrays = sum(leaf.size * 4 for leaf in jax.tree.leaves(state[0]))
    assert peak < 4.1 * arrays
