"""Residuals in host memory between the passes: which, when they are copied back, and that nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar._jax import all_equations, copies_to_or_from_host, on_host
from autopar.inter_op.offloaded_residuals import find_residuals, residuals_on_host
from autopar.ir.check import check_program
from autopar.ir.region import kind_of, region_of
from autopar.ir.trace.trace import trace_step
from autopar.tuning import TUNING

LAYERS, WIDTH, ROWS = 5, 8, 32


def block(x, layer):
    return x + jax.nn.gelu(jnp.tanh(x @ layer["up"]) @ layer["down"])


def unrolled(params, x):
    for k in range(LAYERS):
        x = block(x, jax.tree.map(lambda w, k=k: w[k], params))
    return jnp.mean(x**2)


def scanned(params, x):
    return jnp.mean(jax.lax.scan(lambda x, layer: (block(x, layer), None), x, params)[0] ** 2)


def recomputed(params, x):
    for k in range(LAYERS):
        x = jax.checkpoint(block)(x, jax.tree.map(lambda w, k=k: w[k], params))
    return jnp.mean(x**2)


def train(loss):
    def train_step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return train_step


def arguments():
    rng = np.random.default_rng(0)
    params = {name: jnp.asarray(rng.normal(size=(LAYERS, WIDTH, WIDTH)) / 3, jnp.float32) for name in ("down", "up")}
    return params, jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32)


def program_of(loss):
    return trace_step(train(loss), arguments()).jaxpr


def all_on_host(program):
    """The program with all of its residuals in host memory."""
    found = find_residuals(program)
    return residuals_on_host(found, len(found.values))


def copies(jaxpr, to_host):
    """Equations that copy to (or from) host memory; those of loops too."""
    found = [eqn for eqn in all_equations(jaxpr) if copies_to_or_from_host(eqn)]
    return [eqn for eqn in found if on_host(eqn.outvars[0].aval) is to_host]


@pytest.mark.parametrize("loss, most", [(unrolled, 3 * LAYERS), (scanned, 3), (recomputed, LAYERS)])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_nothing_else_changes(loss, most, share):
    found = find_residuals(program_of(loss))
    count = found.count_of(share)
    assert 0 < count <= len(found.values) <= most and (count == len(found.values)) is (share == 1)
    jaxpr = residuals_on_host(found, count)
    check_program(jaxpr)
    assert len(copies(jaxpr, True)) == len(copies(jaxpr, False)) == count
    got = jax.jit(lambda *args: jax.core.eval_jaxpr(jaxpr, [], *args))(*jax.tree.leaves(arguments()))
    for a, b in zip(got, jax.tree.leaves(jax.jit(train(loss))(*arguments())), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_rows_are_copied_in_the_trips_of_both_loops():
    """No device ever has the whole stack: it is in host memory outside of the loops too."""
    jaxpr = all_on_host(program_of(scanned))
    forward, backward = (region_of(eqn) for eqn in jaxpr.eqns if kind_of(eqn) == "scan")
    assert forward.ys and all(on_host(b.result.aval) for b in forward.ys)
    there = [b for b in backward.xs if on_host(b.operand.aval)]
    assert len(there) == len(forward.ys) and all(on_host(b.var.aval) for b in there)
    assert not any(copies_to_or_from_host(eqn) for eqn in jaxpr.eqns)


def test_what_waits_longest_goes_first():
    found = find_residuals(program_of(unrolled))
    place = {var: k for k, eqn in enumerate(found.program.eqns) for var in eqn.outvars}
    assert [place[var] for var in found.values] == sorted(place[var] for var in found.values)


@pytest.mark.parametrize("loss", [unrolled, recomputed])
def test_copies_back_are_spread_over_the_backward_pass(loss):
    """Few are ahead of what is being read; sums of many layers are copied, not recomputed from the first layers'."""
    jaxpr = all_on_host(program_of(loss))
    place = {eqn: k for k, eqn in enumerate(jaxpr.eqns)}
    back = {place[eqn]: eqn.outvars[0] for eqn in copies(jaxpr, False)}
    read = {at: next(k for k, eqn in enumerate(jaxpr.eqns) if var in eqn.invars) for at, var in back.items()}
    for at in back:
        assert sum(before <= at < read[before] for before in back) <= TUNING.offloaded_reach


def test_a_step_without_a_gradient_has_none():
    program = trace_step(lambda x, w: (jnp.tanh(x @ w), w), (jnp.ones((8, 8)), jnp.ones((8, 8)))).jaxpr
    assert not find_residuals(program).values
