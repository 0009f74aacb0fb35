"""The passes of a microbatch: which equations go forwards and backwards through the stages, how often, and where."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar._jax import Literal
from autopar.inter_op.cut import cut_step
from autopar.inter_op.pass_order import pass_order
from autopar.inter_op.update_rounds import AFTER_LOOP
from autopar.ir.dataflow import inputs_of
from autopar.ir.trace.state import find_roles
from autopar.ir.trace.trace import trace_step

WIDTH, LAYERS, BATCH = 8, 3, 8


def loss_of(params, batch):
    x = batch["x"]
    for kernel in params:
        x = jnp.tanh(x @ kernel)
    return jnp.mean((x - batch["y"]) ** 2)


def plain(params, batch):
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def sharpness_aware(params, batch):
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))
    moved = [p + 0.05 * g / norm for p, g in zip(params, grads, strict=True)]
    grads = jax.grad(loss_of)(moved, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def adversarial(params, batch):
    """Samples are moved, not parameters: no microbatch waits for another."""
    slope = jax.grad(lambda x: loss_of(params, {**batch, "x": x}))(batch["x"])
    return plain(params, {**batch, "x": batch["x"] + 0.1 * jnp.sign(slope)})


def cut(step, count):
    array = jax.ShapeDtypeStruct((BATCH, WIDTH), np.float32)
    program = trace_step(step, ([jnp.ones((WIDTH, WIDTH))] * LAYERS, {"x": array, "y": array}))
    return cut_step(program, find_roles(program, (1,)), 2, count)


def products(made, number):
    """Segments of the matrix products of one pass, in order."""
    eqns = zip(made.chain.loop.eqns, made.chain.passes, made.chain.segment, strict=True)
    return [at for eqn, own, at in eqns if own == number and eqn.primitive.name == "dot_general"]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("step, num_rounds", [(plain, 1), (sharpness_aware, 2), (adversarial, 2)])
def test_each_round_goes_where_the_parameters_are(step, num_rounds, count):
    made = cut(step, count)
    chain = made.chain
    assert chain.num_rounds == num_rounds
    first = products(made, 0)
    assert len(first) == LAYERS and first == sorted(first) and len(set(first)) == LAYERS
    for number in range(1, 2 * num_rounds):
        own = products(made, number)
        assert own == sorted(own, reverse=number % 2 == 1), "even passes go forwards, odd ones back"
        if number % 2 == 0:
            assert own == first
        assert {at for at in own if at in first} == set(own)


@pytest.mark.parametrize("count", [1, 2])
def test_nothing_is_read_before_it_is_made(count):
    made = cut(sharpness_aware, count)
    order = pass_order(made.split)
    assert order.passes == made.chain.passes and set(order.after_pass.values()) == {1}
    number = {v: k for eqn, k in zip(made.chain.loop.eqns, order.passes, strict=True) for v in eqn.outvars}
    for eqn, own in zip(made.chain.loop.eqns, order.passes, strict=True):
        assert all(number.get(a, 0) <= own for a in inputs_of(eqn))
        assert all(order.after_pass.get(made.split.invariant_of.get(a), -1) < own for a in inputs_of(eqn))
    parts = {r.var: part for r, part in zip(made.split.results, made.split.loop.outvars, strict=True)}
    for eqn in made.split.between:
        for a in inputs_of(eqn):
            part = parts.get(a)
            assert part is None or isinstance(part, Literal) or number[part] <= order.after_pass[eqn.outvars[0]]


def test_what_moves_parameters_stands_between_once():
    made = cut(sharpness_aware, 2)
    between = {eqn.outvars[0] for eqn in made.split.between}
    assert between and between.isdisjoint(eqn.outvars[0] for eqn in made.split.after)
    assert max(made.after_pass.values()) < AFTER_LOOP
