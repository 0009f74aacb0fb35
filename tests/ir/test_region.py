"""Regions: taken apart and put together again, they are the same equation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autopar._jax import make_jaxpr, new_var, open_jaxpr
from autopar.ir.check import check_program
from autopar.ir.printer import print_jaxpr
from autopar.ir.region import Binding, kind_of, new_scan, region_of
from autopar.ir.trace.flatten import flatten
from tests.ir.traced import evaluate

X = np.arange(12, dtype=np.float32).reshape(4, 3)


def scanned(x, scale):
    return lax.scan(lambda c, row: (c + scale * row, c.sum()), jnp.zeros(3), x, reverse=True)


def looped(x, limit):
    return lax.while_loop(lambda c: c[1] < limit, lambda c: (c[0] * 0.5 + limit, c[1] + 1), (x, jnp.float32(0)))


def branched(x, which):
    return lax.switch(jnp.int32(which), [lambda x: (x, x + 1), lambda x: (2 * x, x), lambda x: (-x, x * which)], x)


def behind(x, y):
    return lax.optimization_barrier((x + y, y))


STEPS = {"scan": scanned, "while": looped, "cond": branched, "barrier": behind}


def program(kind):
    flat, consts = flatten(*open_jaxpr(jax.make_jaxpr(STEPS[kind])(X, jnp.float32(2))))
    assert not consts
    (at,) = [k for k, eqn in enumerate(flat.eqns) if kind_of(eqn) == kind]
    return flat, at


def with_eqn(flat, at, eqn):
    eqns = list(flat.eqns)
    eqns[at] = eqn
    made = make_jaxpr(flat.invars, flat.outvars, eqns)
    check_program(made)
    return made


@pytest.mark.parametrize("kind", STEPS)
def test_put_together_again(kind):
    """In whatever order the bindings come."""
    flat, at = program(kind)
    region = region_of(flat.eqns[at])
    assert [b.operand for b in region.bindings if b.operand is not None] == list(flat.eqns[at].invars)
    assert [b.result for b in region.bindings if b.result is not None] == list(flat.eqns[at].outvars)
    again = region.rebuild(region.bindings, [body.eqns for body in region.bodies])
    assert print_jaxpr(with_eqn(flat, at, again)) == print_jaxpr(flat)
    turned = with_eqn(flat, at, region.rebuild(region.bindings[::-1], [body.eqns for body in region.bodies]))
    for got, want in zip(evaluate(turned, X, 2.0), evaluate(flat, X, 2.0), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", ["scan", "while", "cond"])
def test_another_constant(kind):
    """It enters all bodies, of a loop's test and its body as two operands; nothing else moves."""
    flat, at = program(kind)
    region = region_of(flat.eqns[at])
    entering = tuple(new_var(flat.invars[1].aval) for _ in region.bodies)
    more = Binding("const", flat.invars[1], entering, (None,) * len(region.bodies))
    wider = region.rebuild([*region.bindings, more], [body.eqns for body in region.bodies])
    assert len(wider.invars) == len(region.eqn.invars) + (2 if kind == "while" else 1)
    made = with_eqn(flat, at, wider)
    for got, want in zip(evaluate(made, X, 2.0), evaluate(flat, X, 2.0), strict=True):
        np.testing.assert_array_equal(got, want)


def test_what_each_body_has():
    """Values for bindings are handed out as operands, results and bodies have them."""
    flat, at = program("while")
    region = region_of(flat.eqns[at])
    roles = [b.role for b in region.bindings]
    assert region.labels == ["test", "body"] and roles == ["test", "const", "const", "carry", "carry"]
    assert region.of_operands(roles) == ["const", "const", "carry", "carry"]
    assert region.of_results(roles) == ["carry", "carry"]
    assert region.entering(0, roles) == region.entering(1, roles) == ["const", "carry", "carry"]
    assert (region.leaving(0, roles), region.leaving(1, roles)) == (["test"], ["carry", "carry"])


def test_new_scan():
    flat, at = program("scan")
    region = region_of(flat.eqns[at])
    forwards = new_scan(region.trips, region.bindings, region.bodies[0].eqns)
    (total, sums) = evaluate(with_eqn(flat, at, forwards), X, 2.0)
    np.testing.assert_allclose(total, 2 * X.sum(0))
    np.testing.assert_allclose(sums, 2 * np.concatenate([[0], np.cumsum(X.sum(1))[:-1]]))
