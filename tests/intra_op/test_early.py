"""A gradient is summed over devices when it is made; but nothing is sent before a sum that the backward pass waits for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.cost.steps import AllReduce, ReduceScatter
from autopar.intra_op.liveness import measure_liveness
from autopar.intra_op.sharded import Compute, Move

LAYERS, WIDTH = 4, 4096


def train_step(params, batch, centered=False):
    """Layers that are written out, all of them updated in the end; `centered`: gradients are, over the whole batch."""
    kept = [batch["x"]]
    for w in params:
        kept.append(jnp.tanh(kept[-1] @ w))
    gradient, grads = kept[-1] - batch["y"], []
    for w, x, y in zip(params[::-1], kept[-2::-1], kept[:0:-1], strict=True):
        inner = gradient * (1 - y**2)
        inner = inner - inner.mean(0) if centered else inner
        grads.insert(0, jnp.einsum("bi,bo->io", x, inner))
        gradient = inner @ w.T
    return [w - 0.1 * g / (1 + jnp.abs(g)) for w, g in zip(params, grads, strict=True)]


def planned(
    zero, centered=False, cluster=None, array=lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32), width=WIDTH
):
    given = [array(width, width) for _ in range(LAYERS)], {"x": array(2 * width, width), "y": array(2 * width, width)}
    fn = functools.partial(train_step, centered=centered)
    method = autopar.DataParallel(zero=zero)
    cluster = cluster or autopar.Cluster.of("8 h100")
    return autopar.parallelize(fn, cluster=cluster, method=method, batch_argnums=(1,), donate_argnums=()), given


def order(step, given):
    """Positions of the products, and of sums of gradients, over devices, with their makers'."""
    body = step.plan(*given).attached.pipeline.stages[0].sharded.body
    made_at = {copy: at for at, instruction in enumerate(body.instructions) for copy in instruction.makes}
    products = [
        at for at, i in enumerate(body.instructions) if isinstance(i, Compute) and i.eqn.primitive.name == "dot_general"
    ]
    sums = [
        (made_at[i.reads[0]], at)
        for at, i in enumerate(body.instructions)
        if isinstance(i, Move) and isinstance(i.step, AllReduce | ReduceScatter) and i.var.aval.shape == (WIDTH, WIDTH)
    ]
    return products, sums


@pytest.mark.parametrize("zero", [0, 3])
def test_gradients_are_sent_during_the_backward_pass(zero):
    products, sums = order(*planned(zero))
    assert len(sums) == LAYERS and all(at == made + 1 for made, at in sums)
    assert sum(at < products[-1] for _, at in sums) == LAYERS - 1


def test_but_not_before_sums_that_it_waits_for():
    products, sums = order(*planned(0, centered=True))
    assert len(sums) == LAYERS and all(at > products[-1] for made, at in sums if made < products[-2])


def test_that_takes_less_memory():
    """Of ZeRO-3, where the sum is an eighth of what is summed: at the last product only the last gradients are on their way,
    where otherwise all wait for each other."""

    def at_the_last_product(centered):
        step, given = planned(3, centered)
        (stage,) = step.plan(*given).attached.pipeline.stages
        products, _ = order(step, given)
        return measure_liveness(stage.sharded.body, stage.mesh, {}).curve[products[-1]]

    assert at_the_last_product(False) <= at_the_last_product(True) - 1.5 * WIDTH * WIDTH * 4


@pytest.mark.parametrize("centered", [False, True])
def test_what_is_sent_early_is_the_same(centered):
    random = np.random.default_rng(0)
    cluster = autopar.Cluster.local(jax.devices()[:4])
    step, given = planned(0, centered, cluster, lambda *shape: random.standard_normal(shape, np.float32) / 8, 64)
    wanted = jax.jit(functools.partial(train_step, centered=centered))(*given)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), step(*given), wanted)
