"""Products with several dims in one group take and make large arrays as they lie; the function stays the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar._jax import open_jaxpr, trace
from autopar.ir.rewrite.dim_order import products_in_order
from autopar.ir.trace.flatten import flatten
from tests.ir.traced import evaluate

BATCH, TOKENS, KEYS, GROUPS, HEADS, WIDTH = 2, 24, 32, 2, 3, 4


def attention(q, k, v):
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", q, k)
    scores = jnp.where(jnp.arange(KEYS) < 30, scores, -1e9)
    return jnp.einsum("bhgqk,bkhd->bqhgd", jax.nn.softmax(scores), v)


def gradient(q, k, v):
    return jax.grad(lambda *arrays: jnp.sum(attention(*arrays) ** 2), argnums=(0, 1, 2))(q, k, v)


def of_scores(eqns):
    """Products and transposes of arrays as large as the scores."""
    size = BATCH * GROUPS * HEADS * TOKENS * KEYS
    for eqn in eqns:
        if eqn.primitive.name in ("dot_general", "transpose"):
            if any(a.aval.size >= size for a in (*eqn.invars, *eqn.outvars)):
                yield eqn


def lies_as_made(eqns):
    """Whether all products make and read scores as the first one makes them, in the order of a library of matrices."""
    made = None
    for eqn in of_scores(eqns):
        if eqn.primitive.name == "dot_general":
            (large,) = [a for a in (*eqn.invars, *eqn.outvars) if a.aval.ndim == 5 and a.aval.size > 2000]
            made = made or large.aval.shape
            if large.aval.shape != made:
                return False
            if large in eqn.invars:
                side = eqn.invars.index(large)
                summed, batch = (dims[side] for dims in eqn.params["dimension_numbers"])
                groups = ["batch" if d in batch else "sum" if d in summed else "own" for d in range(5)]
                if list(dict.fromkeys(groups)) != (["batch", "sum", "own"] if side else ["batch", "own", "sum"]):
                    return False
                if summed != tuple(sorted(summed)):
                    return False
    return True


@pytest.mark.parametrize("function", [attention, gradient])
def test_grouped_attention_turns_no_scores(function):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(BATCH, TOKENS, GROUPS, HEADS, WIDTH), (BATCH, KEYS, GROUPS, WIDTH), (BATCH, KEYS, GROUPS, WIDTH)]
    arrays = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    flat, consts = flatten(*open_jaxpr(trace(function, *(jax.typeof(a) for a in arrays))))
    made = products_in_order(flat)
    assert not lies_as_made(flat.eqns)
    assert lies_as_made(made.eqns)
    for a, b in zip(evaluate(made, *arrays, *consts), jax.tree.leaves(function(*arrays)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_a_product_of_matrices_and_one_of_small_arrays_stay():
    def function(x, w, q, k):
        return x @ w, jnp.einsum("bqhd,bkhd->bhqk", q, k), jnp.einsum("bqhgd,bkhd->bhgqk", q[:, :, :, None], k)

    types = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, 8, 4), (4, 4), (2, 3, 2, 64), (2, 3, 2, 64))]
    flat, _ = flatten(*open_jaxpr(trace(function, *types)))
    assert products_in_order(flat) is flat
