"""Products that are only read transposed have their operands swapped; the function stays the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar._jax import open_jaxpr, trace
from autopar.ir.rewrite.swapped_products import swap_products
from autopar.ir.trace.flatten import flatten
from tests.ir.traced import evaluate


def flat_of(function, *shapes):
    return flatten(*open_jaxpr(trace(function, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))))


def names(jaxpr):
    return [eqn.primitive.name for eqn in jaxpr.eqns]


def product(numbers, order, precision=None):
    """A product, transposed."""
    return lambda a, b: jax.lax.transpose(jax.lax.dot_general(a, b, numbers, precision), order)


@pytest.mark.parametrize(
    "function, shapes",
    [
        (lambda w, x: jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w), [(4, 3), (8, 4)]),
        (product((((0, 1), (0, 1)), ((), ())), (1, 2, 0), ("highest", "default")), [(2, 5, 3), (2, 5, 4, 6)]),
    ],
)
def test_a_transpose_of_a_product_is_the_product_of_swapped_operands(function, shapes):
    flat, consts = flat_of(function, *shapes)
    made = swap_products(flat)
    assert "transpose" in names(flat) and "transpose" not in names(made)
    assert names(made).count("dot_general") == names(flat).count("dot_general")
    arrays = [np.random.default_rng(k).normal(size=s).astype(np.float32) for k, s in enumerate(shapes)]
    for got, want in zip(evaluate(made, *arrays, *consts), jax.tree.leaves(function(*arrays)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)  # products of other shapes add up in another order


@pytest.mark.parametrize(
    "function, shapes",
    [
        (lambda a, b: (lambda c: (c.T, c * 2.0))(a @ b), [(3, 4), (4, 5)]),  # another reader
        (lambda a, b: (lambda c: (c, c.T))(a @ b), [(3, 4), (4, 5)]),  # a result
        (product((((1,), (0,)), ((), ())), (1, 0, 2)), [(3, 4), (4, 5, 6)]),  # rows between columns
        (product((((2,), (1,)), ((0,), (0,))), (0, 2, 1)), [(2, 3, 4), (2, 4, 5)]),  # several matrices
    ],
)
def test_others_stay(function, shapes):
    flat, _ = flat_of(function, *shapes)
    assert "transpose" in names(flat) and swap_products(flat) is flat


@pytest.mark.parametrize("method", [autopar.PipelineParallel(2, num_microbatches=4), autopar.ShardParallel((4,), 4)])
def test_the_update_transposes_no_sum_of_gradients(method):
    """It read the sum over microbatches column by column: on CPUs that took four times as long as the rest of the update."""

    def step(params, x):
        def loss(params):
            return jnp.mean(jnp.tanh(x @ params["up"]) @ params["down"])

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in (("up", (32, 64)), ("down", (64, 32)))}
    plan = autopar.parallelize(step, cluster=autopar.Cluster.of("4 a100"), method=method).plan(
        params, jax.ShapeDtypeStruct((64, 32), jnp.float32)
    )
    stages = plan.attached.pipeline.stages
    eqns = [eqn for stage in stages for task in stage.tasks if task.task.kind in "U" for eqn in task.task.jaxpr.eqns]
    last = stages[-1].tasks[-1].task.jaxpr.eqns
    assert "transpose" not in [eqn.primitive.name for eqn in (eqns or last)]
