"""Casts to 16 bits leave loops and branches: parts of a gradient that cancel are added up before they are narrowed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar._jax import eval_jaxpr
from autopar.ir.check import check_program
from autopar.ir.rewrite.late_narrowing import narrow_late
from autopar.ir.split.microbatches.accumulate import accumulate
from autopar.ir.trace.state import find_roles
from autopar.ir.trace.trace import trace_step
from tests.ir.traced import split_microbatches

HALF = jnp.bfloat16


def layers(p, x):
    """Scales in 16 bits, norms in 32: the stack of a gradient."""

    def layer(h, w):
        normed = h * jax.lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6) * w["scale"].astype(jnp.float32)
        return h + jnp.tanh(jnp.einsum("bd,df->bf", normed, w["w"].T, preferred_element_type=jnp.float32)), None

    return jax.lax.scan(layer, x, {"scale": p["scales"], "w": p["ws"]})[0]


def cells(p, x):
    """The same parameters in every trip, used twice: the sum of a gradient."""

    def cell(h, x):
        h = jnp.tanh(x * p["scale"].astype(jnp.float32) + h * p["scale"].astype(jnp.float32))
        return h, h

    return jax.lax.scan(cell, jnp.zeros_like(x), jnp.stack([x, -2 * x, x]))[0]


def branch(p, x):
    """One branch makes a gradient, the other none."""
    return jax.lax.cond(p["scale"][0] > 0, lambda: jnp.tanh(x @ p["w"].astype(jnp.float32)), lambda: x)


def nested(p, x):
    """A branch in a loop in a loop."""

    def outer(h, scale):
        def inner(h, flag):
            return jax.lax.cond(flag, lambda: jnp.tanh(h * scale.astype(jnp.float32)), lambda: h), None

        return jax.lax.scan(inner, h, jnp.arange(2) < 1)[0], None

    return jax.lax.scan(outer, x, p["scales"])[0]


MODELS = {"layers": layers, "cells": cells, "branch": branch, "nested": nested}


def parameters():
    ones = {"scale": jnp.ones(8, HALF), "scales": jnp.ones((3, 8), HALF)}
    random = np.random.default_rng(0)
    w, ws = (jnp.asarray(random.normal(size=shape) / 3, HALF) for shape in ((8, 8), (3, 8, 8)))
    return {**ones, "w": w, "ws": ws}


def samples():
    """The halves of the batch pull in opposite directions, and nearly cancel."""
    random = np.random.default_rng(1)
    x, y = random.normal(size=(4, 8)), 300 * random.normal(size=(4, 8))
    return {"x": jnp.asarray(np.concatenate([x, x]), jnp.float32), "y": jnp.asarray(np.concatenate([y, 0.1 - y]), HALF)}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_that_cancel(name):
    def step(p, batch):
        loss = lambda p: jnp.sum(MODELS[name](p, batch["x"]) * batch["y"].astype(jnp.float32))  # noqa: E731
        value, gradient = jax.value_and_grad(loss)(p)
        # A gradient that is a sum of terms in 16 bits is rounded term by term; this one is compared as it is.
        return jax.tree.map(lambda p, g: (p - g).astype(p.dtype), p, gradient), {"loss": value.astype(HALF)}

    p, batch = parameters(), samples()
    traced = trace_step(step, (p, batch))
    flat = narrow_late(traced.jaxpr)
    check_program(flat)
    split = split_microbatches(flat, 2, find_roles(traced, (1,)).batch)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), p)
    exact = jax.tree.leaves(jax.jit(step)(wide, batch))
    plain = jax.tree.leaves(jax.jit(step)(p, batch))
    for program in (flat, accumulate(flat, split)):
        got = jax.jit(lambda *args, program=program: eval_jaxpr(program, (), *args))(*jax.tree.leaves((p, batch)))
        for ours, theirs, truth in zip(got, plain, exact, strict=True):
            assert ours.dtype == theirs.dtype
            ours, theirs, truth = (np.asarray(leaf, np.float64) for leaf in (ours, theirs, truth))
            scale = np.abs(truth).max()
            # No further from the truth than one rounding, or than the step itself is.
            assert np.abs(ours - truth).max() <= scale * 2**-8 + 1.5 * np.abs(theirs - truth).max(), program


@pytest.mark.parametrize("are_shared", [False, True])
def test_parameters_that_layers_cast(are_shared):
    """A layer rounds its 32-bit parameters to 16 bits, so their gradients are rounded, too: once, not for each microbatch.

    Of shared parameters, each layer's part of the gradient is rounded by itself before it is added.
    """

    def layer(h, scale):
        normed = h * jax.lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)
        return h + jnp.tanh(normed * scale.astype(HALF).astype(jnp.float32)), None

    def out(p, x):
        if are_shared:
            return jax.lax.scan(lambda h, _: jax.checkpoint(layer)(h, p), x, None, 3)[0]
        return jax.lax.scan(jax.checkpoint(layer), x, p)[0]

    def step(p, batch):
        value, gradient = jax.value_and_grad(lambda p: jnp.sum(out(p, batch["x"]) * batch["y"].astype(jnp.float32)))(p)
        return p - gradient, {"loss": value}

    p, batch = jnp.ones(8 if are_shared else (3, 8)), samples()
    traced = trace_step(step, (p, batch))
    flat = narrow_late(traced.jaxpr)
    check_program(flat)
    program = accumulate(flat, split_microbatches(flat, 2, find_roles(traced, (1,)).batch))
    ours, theirs = eval_jaxpr(program, (), *jax.tree.leaves((p, batch)))[0], jax.jit(step)(p, batch)[0]
    np.testing.assert_allclose(p - ours, p - theirs, rtol=2**-7, atol=1e-4)


def test_large_addends_are_not_stacked():
    """A weight's gradient may be larger than the samples of a trip; the stack would not fit in memory."""

    def loss(p, x):
        def cell(h, x):
            return jnp.tanh(jnp.dot(h + x, p.astype(HALF), preferred_element_type=jnp.float32)).astype(HALF), None

        return jnp.sum(jax.lax.scan(cell, x[0], x)[0].astype(jnp.float32) ** 2)

    def step(p, x):
        return p - jax.grad(loss)(p, x)

    traced = trace_step(step, (jnp.ones((8, 8)), jnp.ones((3, 2, 8), HALF)))
    assert narrow_late(traced.jaxpr) is traced.jaxpr


def test_what_is_stacked_going_forward_stays_narrow():
    def step(p, batch):
        hidden = jax.lax.scan(lambda h, w: (jnp.tanh(h * w), h.astype(HALF)), batch["x"], jnp.ones((3, 8)))[1]
        return p, {"hidden": hidden}

    traced = trace_step(step, (parameters(), samples()))
    assert narrow_late(traced.jaxpr) is traced.jaxpr
