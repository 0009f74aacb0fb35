"""State in host memory: which copies there are, when, and that nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar._jax import Literal, all_equations, copies_to_or_from_host, on_host
from autopar.ir.check import check_program
from autopar.ir.region import kind_of, region_of
from autopar.ir.rewrite.state_on_host import state_on_host
from autopar.ir.split.layers.update import update_by_layer
from autopar.ir.trace.state import find_roles
from autopar.ir.trace.trace import trace_step
from autopar.tuning import TUNING

LAYERS, WIDTH, ROWS = 8, 8, 16


def block(x, w):
    return x + jnp.tanh(x @ w)


def unrolled(params, x):
    for w in params:
        x = block(x, w)
    return jnp.mean(x**2)


def cast(params, x):
    return unrolled([w.astype(jnp.bfloat16) for w in params], x.astype(jnp.bfloat16)).astype(jnp.float32)


def recomputed(params, x):
    for w in params:
        x = jax.checkpoint(block)(x, w)
    return jnp.mean(x**2)


def scanned(params, x):
    return jnp.mean(jax.lax.scan(lambda x, w: (block(x, w), None), x, params)[0] ** 2)


def scanned_casts(params, x):
    return scanned(params.astype(jnp.bfloat16), x.astype(jnp.bfloat16)).astype(jnp.float32)


def train(loss, clips=False, first="params"):
    """`first`: the part of the state that leads it."""

    def train_step(state, x):
        params, moments = state if first == "params" else state[::-1]
        value, grads = jax.value_and_grad(loss)(params, x)
        if clips:
            norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
            grads = jax.tree.map(lambda g: g / jnp.maximum(norm, 1e-3), grads)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
        state = jax.tree.map(lambda p, m: p - 0.1 * (m + 0.01 * p), params, moments), moments
        return state if first == "params" else state[::-1], value

    return train_step


def arguments(loss, layers=LAYERS, width=WIDTH, rows=ROWS):
    rng = np.random.default_rng(0)
    ws = jnp.asarray(rng.normal(size=(layers, width, width)) / width**0.5, jnp.float32)
    params = ws if loss in (scanned, scanned_casts) else list(ws)
    return (params, jax.tree.map(jnp.ones_like, params)), jnp.asarray(rng.normal(size=(rows, width)), jnp.float32)


def offloaded(loss, clips=False, first="params"):
    """The step with all of its state in host memory."""
    program = trace_step(train(loss, clips, first), arguments(loss))
    roles = find_roles(program)
    by_layer = update_by_layer(program.jaxpr, list(roles.aliases))
    jaxpr = state_on_host(by_layer, roles.state, roles.aliases)
    check_program(jaxpr)
    return jaxpr


def copies(eqns, to_host):
    return [e for e in eqns if copies_to_or_from_host(e) and on_host(e.outvars[0].aval) is to_host]


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("loss", [unrolled, cast, recomputed, scanned, scanned_casts])
def test_nothing_else_changes(loss, clips):
    jaxpr, args = offloaded(loss, clips), arguments(loss)
    state = jax.tree.leaves(args[0])
    assert all(on_host(var.aval) for var in jaxpr.invars[: len(state)])
    assert all(on_host(a.aval) for a in jaxpr.outvars[: len(state)])
    got = jax.jit(lambda *args: jax.core.eval_jaxpr(jaxpr, [], *args))(*jax.tree.leaves(args))
    expected = jax.jit(train(loss, clips))(*args)
    for a, b in zip(got, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("loss", [unrolled, cast, recomputed])
def test_parameters_are_copied_again_for_the_backward_pass(loss):
    """But those that it begins with; few copies, and casts of them, are on the device at once."""
    jaxpr = offloaded(loss)
    fetched = copies(jaxpr.eqns, False)
    again = len(fetched) - 2 * LAYERS  # moments are copied once, and so are parameters for the forward pass
    assert LAYERS - TUNING.fetched_reach - 1 <= again <= 2 * LAYERS
    begin = {e.outvars[0]: k for k, e in enumerate(jaxpr.eqns) if e in fetched}
    of_copy = {var: var for var in begin}
    for eqn in jaxpr.eqns:
        sources = {of_copy[a] for a in eqn.invars if not isinstance(a, Literal) and a in of_copy}
        if len(sources) == 1 and eqn.primitive.name in ("convert_element_type", "transpose"):
            of_copy.update(dict.fromkeys(eqn.outvars, *sources))
    end = dict(begin)
    for k, eqn in enumerate(jaxpr.eqns):
        end.update({of_copy[a]: k for a in eqn.invars if not isinstance(a, Literal) and a in of_copy})
    most = max(sum(begin[v] <= k <= end[v] for v in begin) for k in range(len(jaxpr.eqns)))
    assert most <= TUNING.fetched_reach + 3 < LAYERS


def test_updates_stand_in_the_backward_pass():
    """Each frees its gradient; a norm of all gradients has to be waited for."""
    for clips in (False, True):
        jaxpr = offloaded(unrolled, clips)
        last = max(k for k, e in enumerate(jaxpr.eqns) if e.primitive.name == "dot_general")
        updated = [k for k, e in enumerate(jaxpr.eqns) if e in copies(jaxpr.eqns, True)]
        assert len(updated) == 2 * LAYERS and (min(updated) > last) is clips


@pytest.mark.parametrize("first", ["params", "moments"])
def test_a_parameter_is_updated_with_its_moments(first):
    """Whatever leads the state: the moments of all would wait on the device for the parameters."""
    jaxpr = offloaded(unrolled, True, first)
    made = {e.invars[0]: k for k, e in enumerate(copies(jaxpr.eqns, True))}
    maker = {e.outvars[0]: e for e in jaxpr.eqns}
    leaves = [maker[v].invars[0] for v in jaxpr.outvars[: 2 * LAYERS]]
    at = [made[v] for v in leaves]
    pairs = zip(at[:LAYERS], at[LAYERS:], strict=True)
    assert all(abs(a - b) == 1 for a, b in pairs)


@pytest.mark.parametrize("loss", [scanned, scanned_casts])
@pytest.mark.parametrize("clips", [False, True])
def test_no_whole_stack_is_copied(loss, clips):
    """Scans read rows of stacks there; so does the update, which is a scan over layers too."""
    jaxpr = offloaded(loss, clips)
    assert not any(map(copies_to_or_from_host, jaxpr.eqns))
    forward, backward, update = (region_of(e) for e in jaxpr.eqns if kind_of(e) == "scan")
    for scan, read, made in ((forward, 1, 0), (backward, 1, 0), (update, 2, 2)):
        assert sum(on_host(b.operand.aval) for b in scan.xs) == read
        assert sum(on_host(b.result.aval) for b in scan.ys) == made
    moved = [e for e in all_equations(jaxpr) if copies_to_or_from_host(e)]
    assert {e.outvars[0].aval.shape for e in moved} == {(WIDTH, WIDTH)}


def test_a_weight_that_is_read_in_every_trip_is_copied_once():
    def loss(w, x):
        return jnp.mean(jax.lax.scan(lambda x, _: (block(x, w), None), x, length=4)[0] ** 2)

    def step(w, x):
        value, grad = jax.value_and_grad(loss)(w, x)
        return w - 0.1 * grad, value

    args = jnp.eye(WIDTH), jnp.ones((ROWS, WIDTH))
    program = trace_step(step, args)
    jaxpr = state_on_host(program.jaxpr, [0], find_roles(program).aliases)
    check_program(jaxpr)
    everywhere = [e for e in all_equations(jaxpr) if copies_to_or_from_host(e)]
    assert len(copies(everywhere, False)) == len(copies(jaxpr.eqns, False)) >= 1
    got = jax.jit(lambda *args: jax.core.eval_jaxpr(jaxpr, [], *args))(*args)
    for a, b in zip(got, jax.jit(step)(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
