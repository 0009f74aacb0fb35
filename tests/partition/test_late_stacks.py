"""A scan whose stacks begin no earlier than it does returns what `lax.scan` does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar.partition.stacks import late_stacks, scan_into
from tests.intra_op.test_liveness import N, lowered
from tests.partition.test_late import emitted, needed_for

XS = jnp.arange(12.0).reshape(4, 3)
TYPES = dict(enumerate([jax.ShapeDtypeStruct((4, 3), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.bool_)]))


def scan_into_late_stacks(step, carries, xs, types, **how):
    return scan_into(late_stacks(carries, types), {}, step, carries, xs, **how)


def step(carried, rows):
    (total,), (row,) = carried, rows
    total = 0.5 * total + row
    return (total,), (total * row, total.sum() > 5)


@pytest.mark.parametrize("how", [{"reverse": False, "unroll": 1}, {"reverse": True, "unroll": 2}], ids=str)
def test_as_scan(how):
    found = jax.jit(lambda x: scan_into_late_stacks(step, (x,), (XS,), TYPES, length=4, **how))(jnp.ones(3))
    expected = lax.scan(step, (jnp.ones(3),), (XS,), length=4, **how)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def test_without_stacks_or_carries_it_is_that_scan():
    how = {"length": 4, "reverse": False, "unroll": 1}
    assert str(
        jax.make_jaxpr(lambda x: scan_into_late_stacks(lambda c, r: (c, ()), (x,), (XS,), {}, **how))(1.0)
    ) == str(jax.make_jaxpr(lambda x: lax.scan(lambda c, r: (c, ()), (x,), (XS,), **how))(1.0))


def test_the_zeros_wait_for_what_is_carried():
    how = {"length": 4, "reverse": False, "unroll": 1}
    jaxpr = jax.make_jaxpr(lambda x: scan_into_late_stacks(step, (x,), (XS,), TYPES, **how))(jnp.ones(3)).jaxpr
    known = {jaxpr.invars[0]}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            stacks = [a for a in eqn.invars if a.aval.shape in ((4, 3), (4,)) and a is not jaxpr.constvars[0]]
            assert stacks and all(a in known for a in stacks)
        if any(a in known for a in eqn.invars if not hasattr(a, "val")):
            known.update(eqn.outvars)


def gradient(rows, w):
    """Of a recurrent layer by its inputs: stacked as what the layer stacked."""

    def cell(h, row):
        h = jnp.tanh((h + row) @ w)
        return h, h

    return jax.grad(lambda rows: jnp.sum(lax.scan(cell, jnp.zeros((N, N)), rows)[1] ** 2))(rows)


def summed(rows, w):
    """Rows of another shape than what is read."""
    return lax.scan(lambda total, row: (total + row, (total @ w)[0]), jnp.zeros((N, N)), rows)


@pytest.mark.parametrize("step, num_late", [(gradient, 1), (summed, 0)])
def test_on_gpus_zeros_like_those_of_an_earlier_loop_wait(step, num_late):
    """XLA would make both before the earlier loop: an LSTM of two layers took 6 % more memory."""
    body, mesh, _ = lowered(step, (4, N, N), (N, N))
    jaxpr = emitted(body, mesh, "cuda")
    loops = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    stacked = {var for loop in loops[:-1] for var in loop.outvars if var.aval.shape == (4, N, N)}
    begun = {var for var in loops[-1].invars if not hasattr(var, "val") and var.aval.shape == (4, N, N)} - stacked
    made = [k for k, eqn in enumerate(jaxpr.eqns) if not begun.isdisjoint(eqn.outvars)]
    late = [k for k in made if jaxpr.eqns[k].primitive.name == "broadcast_in_dim"]
    assert len(late) == num_late and all(not stacked.isdisjoint(needed_for(jaxpr, k)) for k in late)
