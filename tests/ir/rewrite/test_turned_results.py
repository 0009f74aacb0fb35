"""A product whose result is only turned makes it so; the function stays the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar._jax import eval_jaxpr, open_jaxpr, trace
from autopar.ir.rewrite.turned_results import results_in_order
from autopar.ir.trace.flatten import flatten


def gradient(x, w):
    return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)


def in_a_loop(x, w):
    return jax.lax.scan(lambda total, row: (total + gradient(row, w), None), jnp.zeros_like(w), x[None])[0]


def of_batches(x, w):
    return jnp.matmul(jnp.stack([x, x]), jnp.stack([w, w])).swapaxes(1, 2)


def transposes(jaxpr):
    inside = [v for eqn in jaxpr.eqns for v in eqn.params.values() if hasattr(v, "jaxpr")]
    own = [eqn.params["permutation"] for eqn in jaxpr.eqns if eqn.primitive.name == "transpose"]
    return own + [found for body in inside for found in transposes(body.jaxpr)]


def made(function, *arrays):
    flat, consts = flatten(*open_jaxpr(trace(function, *(jax.typeof(a) for a in arrays))))
    return flat, results_in_order(flat), consts


ARRAYS = jnp.arange(12.0).reshape(3, 4) / 12, jnp.arange(20.0).reshape(4, 5) / 20


@pytest.mark.parametrize("function", [gradient, in_a_loop, of_batches])
def test_a_product_makes_what_is_read(function):
    before, after, consts = made(function, *ARRAYS)
    assert transposes(before)
    assert not transposes(after)
    for a, b in zip(eval_jaxpr(after, (), *ARRAYS, *consts), jax.tree.leaves(function(*ARRAYS)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_what_others_read_too_stays():
    def both(x, w):
        product = x @ w
        return product, product.T

    before, after, _ = made(both, *ARRAYS)
    assert after is before


def test_another_order_stays():
    def another(x, w):
        return jnp.transpose(jnp.einsum("bij,bjk->bik", x[None], w[None]), (1, 0, 2))

    before, after, _ = made(another, *ARRAYS)
    assert after is before
