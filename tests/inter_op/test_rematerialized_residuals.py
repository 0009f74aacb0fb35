"""What loops keep for their gradients: as little as JAX's own policy, the same values, and nothing that is read elsewhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar._jax import eval_jaxpr
from autopar.inter_op.rematerialized_residuals import rematerialize_residuals
from autopar.ir.check import check_program
from autopar.ir.dataflow import inputs_of
from autopar.ir.region import bodies_of, region_of, trip_count
from autopar.ir.trace.trace import trace_step
from autopar.ir.work import num_bytes
from tests.inter_op.test_residuals import BATCH, LENGTH, WIDTH, bytes_that_jax_saves, layer, layer_types

LAYERS = 3
RNG = np.random.default_rng(0)
KERNELS = (RNG.normal(size=(LAYERS, 8, 8)) / 3).astype(np.float32)
X = RNG.normal(size=(4, 8)).astype(np.float32)


def scans(jaxpr):
    return [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]


def stacked_bytes(jaxpr):
    """Of what scans stack for other scans."""
    read = {var for eqn in scans(jaxpr) for var in inputs_of(eqn)}
    return sum(num_bytes(b.result) for eqn in scans(jaxpr) for b in region_of(eqn).ys if b.result in read)


def num_heavy(jaxpr):
    """Products in the bodies of scans, each as often as it runs."""
    names = [e.primitive.name for eqn in scans(jaxpr) for body in bodies_of(eqn) for e in body.eqns]
    return names.count("dot_general")


def made_lean(function, *args):
    """The program before and after, which gives the same."""
    program = trace_step(function, args)
    lean = rematerialize_residuals(program.jaxpr)
    check_program(lean)
    inputs = program.flatten_inputs(jax.tree.leaves(args))
    before, after = (jax.jit(lambda *xs, j=j: eval_jaxpr(j, (), *xs))(*inputs) for j in (program.jaxpr, lean))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), before, after)
    assert num_heavy(lean) == num_heavy(program.jaxpr), "nothing heavy runs again"
    return program.jaxpr, lean


def gradient(loss_fn):
    return lambda *args: jax.value_and_grad(loss_fn)(*args)


def test_a_layer_keeps_no_more_than_under_dots_saveable():
    params = jax.tree.map(lambda t: (RNG.normal(size=(LAYERS, *t.shape)) / 8).astype(np.float32), layer_types())
    x = RNG.normal(size=(BATCH, LENGTH, WIDTH)).astype(np.float32)

    def loss_fn(params, x):
        return jnp.mean(lax.scan(lambda x, one: (layer(one, x), None), x, params)[0] ** 2)

    before, lean = made_lean(gradient(loss_fn), params, x)
    data = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32)
    # What enters a layer is an argument of it, not of the step.
    limit = LAYERS * bytes_that_jax_saves(lambda params, x: layer(params, x), layer_types(), data, counted=("x",))
    assert 0 < stacked_bytes(lean) <= limit < stacked_bytes(before)


def test_what_enters_is_kept_and_cheap_work_runs_again():
    def loss_fn(kernels, x):
        return jnp.sum(lax.scan(lambda x, kernel: (jnp.sin(jnp.tanh(jnp.exp(x)) @ kernel), None), x, kernels)[0])

    before, lean = made_lean(gradient(loss_fn), KERNELS, X)
    assert stacked_bytes(lean) == 2 * LAYERS * X.nbytes < stacked_bytes(before), "x, and the product"


@pytest.mark.parametrize("reverse", [False, True])
def test_trips_stay_together(reverse):
    """Constants of the loop, weights of the trip and rows of another loop are read where they are needed again."""
    scale = RNG.normal(size=8).astype(np.float32)

    def loss_fn(kernels, scale, x):
        first, rows = lax.scan(lambda c, k: (jnp.cos(c) @ k, c * 2), x, kernels, reverse=reverse)

        def body(carry, given):
            kernel, row = given
            return jnp.tanh(jnp.exp(carry * scale) * kernel[0] + jnp.sin(row)) @ kernel, None

        return jnp.mean(lax.scan(body, first, (kernels, rows), reverse=reverse)[0] ** 2)

    before, lean = made_lean(jax.value_and_grad(loss_fn, argnums=(0, 1, 2)), KERNELS, scale, X)
    assert stacked_bytes(lean) < stacked_bytes(before)


def test_what_is_read_elsewhere_stays():
    """Activations that the step also returns are there anyway, and are read, not made again."""

    def loss_fn(kernels, x):
        last, rows = lax.scan(lambda x, kernel: ((y := jnp.tanh(x @ kernel)), y), x, kernels)
        return jnp.sum(last**2), rows

    program = trace_step(jax.value_and_grad(loss_fn, has_aux=True), (KERNELS, X))
    lean = made_lean(jax.value_and_grad(loss_fn, has_aux=True), KERNELS, X)[1]
    assert len(lean.outvars) == len(program.jaxpr.outvars)
    (backward,) = (eqn for eqn in scans(lean) if region_of(eqn).ys and eqn.params["reverse"])
    names = [eqn.primitive.name for body in bodies_of(backward) for eqn in body.eqns]
    assert "tanh" not in names


def test_two_gradients_of_one_loop():
    """Two backward loops of one forward loop: what both read stays."""

    def step(kernels, x):
        out, pull = jax.vjp(lambda k: lax.scan(lambda x, kernel: (jnp.sin(x @ kernel), None), x, k)[0], kernels)
        return pull(jnp.ones_like(out)), pull(out)

    before, lean = made_lean(step, KERNELS, X)
    assert stacked_bytes(lean) <= stacked_bytes(before)


def test_nothing_to_win():
    """A loop that JAX already recomputes, and one without a gradient, stay as they are."""

    def loss_fn(kernels, x):
        body = jax.checkpoint(lambda x, kernel: (jnp.sin(jnp.exp(x) @ kernel), None))
        return jnp.sum(lax.scan(body, x, kernels)[0])

    before, lean = made_lean(gradient(loss_fn), KERNELS, X)
    assert stacked_bytes(lean) == stacked_bytes(before) == LAYERS * X.nbytes
    before, lean = made_lean(lambda kernels, x: lax.scan(lambda x, k: (jnp.sin(x @ k), x), x, kernels), KERNELS, X)
    assert [trip_count(eqn) for eqn in scans(lean)] == [LAYERS] and len(lean.eqns) == len(before.eqns)


def test_random_bits_are_kept():
    """Dropout's bits are drawn once; the mask made of them is cheap to keep."""
    keys = jax.random.split(jax.random.key(0), LAYERS)

    def loss_fn(kernels, x):
        def body(x, given):
            kernel, key = given
            keep = jax.random.bernoulli(key, 0.5, x.shape)
            return jnp.where(keep, jnp.exp(x) @ kernel, 0.0), None

        return jnp.sum(lax.scan(body, x, (kernels, keys))[0] ** 2)

    before, lean = made_lean(gradient(loss_fn), KERNELS, X)
    assert stacked_bytes(lean) <= stacked_bytes(before)
    backward = [eqn for eqn in scans(lean) if eqn.params["reverse"]]
    names = [e.primitive.name for eqn in backward for body in bodies_of(eqn) for e in body.eqns]
    assert not any("random" in name or "threefry" in name for name in names)
