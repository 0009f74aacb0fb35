"""What is told of stages that are far from even, and what is not."""

from __future__ import annotations

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.sweep import QUICK, SLOW

WIDTH, ROWS, NUM_LAYERS = 16, 32, 8
BATCH = jax.ShapeDtypeStruct((ROWS, WIDTH), np.float32)


def layer_fn(x, kernel):
    return x + jnp.tanh(x @ kernel), None


def layers(params, x):
    return jax.lax.scan(layer_fn, x, params["layers"])[0]


def unrolled(params, x):
    for k in range(NUM_LAYERS):
        x, _ = layer_fn(x, params["layers"][k])
    return x


def indexed(params, x):
    return jax.lax.fori_loop(0, NUM_LAYERS, lambda k, x: layer_fn(x, params["layers"][k])[0], x)


def over_time(params, x):
    times = jnp.stack([x] * NUM_LAYERS)
    return jax.lax.scan(lambda carry, t: layer_fn(carry + t, params["embed"]), x, times)[0]


def unstacked(params, x):
    return jax.lax.scan(lambda x, _: layer_fn(x, params["embed"]), x, length=NUM_LAYERS)[0]


def one_is_read(params, x):
    return layers(params, x) * (params["layers"][0] ** 2).sum()


def read_whole(params, x):
    return layers(params, x) * jnp.sort(params["layers"], axis=0)[0].sum()


def marked(params, x):
    """A border where the user wants it."""
    return autopar.mark_stage(jnp.tanh(layers({"layers": params["layers"][:2]}, x)))


def told(model, num_stages=2, schedule="1f1b", batch=BATCH, layers=NUM_LAYERS):
    def step(params, batch):
        def loss_fn(params):
            inputs = params["embed"][batch] if batch.ndim == 1 else batch @ params["embed"]
            return jnp.mean((model(params, inputs) @ params["head"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    square = jax.ShapeDtypeStruct((WIDTH, WIDTH), np.float32)
    stack = jax.ShapeDtypeStruct((layers, WIDTH, WIDTH), np.float32)
    method = autopar.PipelineParallel(num_stages=num_stages, num_microbatches=4, schedule=schedule)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        autopar.parallelize(
            step, cluster=autopar.Cluster(1, num_stages, SLOW, QUICK), method=method, batch_argnums=(1,)
        ).plan({"embed": square, "layers": stack, "head": square}, batch)
    found = [w for w in found if "far from even" in str(w.message)]
    assert all(w.filename == __file__ for w in found), "a warning shows the line that called autopar"
    return [str(w.message) for w in found]


def recomputed(params, x):
    """Layers of many operations: taking a layer's weights out of their stack is little of the work."""

    @jax.checkpoint
    def layer(x, kernel):
        inside = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        for _ in range(4):
            inside = jnp.tanh(inside @ kernel)
        return x + inside, None

    return jax.lax.scan(layer, x, params["layers"])[0]


def recomputed_as_one(params, x):
    """The whole model in one checkpoint: all of it is computed again before its first gradient."""

    @jax.checkpoint
    def model(params, x):
        for k in range(0, NUM_LAYERS, 4):
            x = jnp.tanh(x @ params["layers"][k])
            x = jnp.tanh(x @ params["layers"][k + 1])
            x = jnp.tanh(x @ params["layers"][k + 2])
            x = jnp.tanh(x @ params["layers"][k + 3])
        return x

    return model(params, x)


@pytest.mark.parametrize(
    "model, reason",
    [
        (unstacked, "it runs over no stack of layers"),
        (over_time, "its turns share them"),
        (read_whole, "they are also read whole"),
    ],
)
def test_a_loop_that_stays_whole_is_named(model, reason):
    (text,) = told(model)
    assert text.startswith("step: the stages are far from even: stage ") and " of 2 has 9" in text
    assert "is one piece: scan at " in text and "test_uneven.py:" in text and reason in text


@pytest.mark.parametrize("model", [layers, unrolled, indexed, one_is_read])
@pytest.mark.parametrize("num_stages, schedule", [(2, "1f1b"), (2, "interleaved"), (4, "1f1b")])
def test_even_stages_are_no_news(model, num_stages, schedule):
    assert told(model, num_stages, schedule) == []


def test_more_stages_than_layers_of_work():
    """Three products for five stages: one is more than the share of a stage."""
    (text,) = told(lambda params, x: layer_fn(x, params["layers"][0])[0], 5)
    assert "dot_general at " in text and text.endswith(").")


def test_a_piece_of_many_operations():
    (text,) = told(recomputed_as_one, 3)
    told_of = r"\d\d% of the work is one piece: \d\d operations, \d\d of them of the backward pass.* at test_uneven.py"
    assert re.search(told_of, text)


def test_marks_are_the_users_choice():
    assert told(marked) == []


def test_layers_of_a_tiny_model_are_recomputed_where_their_weights_are():
    assert not told(recomputed, batch=jax.ShapeDtypeStruct((2 * ROWS,), np.int32), layers=2)


@pytest.mark.parametrize("mean", ["plain", "of a mean"])
def test_what_backward_passes_wait_for_is_the_users_sum(mean):
    """Not the copy of it that the phases are joined by."""

    def step(params, batch):
        def loss_fn(params):
            gate = jax.nn.softmax(jnp.tanh(batch @ params["embed"]) @ params["gate"])
            share = (gate > 0.3).astype(jnp.float32).sum(0)
            share = share / ROWS if mean == "of a mean" else share
            return jnp.mean((gate @ params["head"]) ** 2) + (share * gate.sum(0)).sum()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    shapes = {"embed": (WIDTH, WIDTH), "gate": (WIDTH, 4), "head": (4, WIDTH)}
    params = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=4)
    with pytest.warns(UserWarning, match=r"all microbatches \(reduce_sum at test_uneven.py:\d+ \(loss_fn\)\)"):
        autopar.parallelize(step, cluster=autopar.Cluster(1, 2, SLOW, QUICK), method=method).plan(params, BATCH)


@pytest.mark.parametrize("num_microbatches, text", [(4, "with num_microbatches=8, each of its turns"), (None, "")])
def test_microbatches_of_the_users_own(num_microbatches, text):
    """A loop that adds up gradients is one piece, unless there are as many microbatches, as there are if that is left open."""

    def step(params, batch):
        def add(total, part):
            grads = jax.grad(lambda params: jnp.mean(layers(params, part) ** 2))(params)
            return jax.tree.map(jnp.add, total, grads), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        grads, _ = jax.lax.scan(add, zeros, batch.reshape(8, -1, WIDTH))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    method = autopar.PipelineParallel(num_stages=2, num_microbatches=num_microbatches)
    stack = {"layers": jax.ShapeDtypeStruct((NUM_LAYERS, WIDTH, WIDTH), np.float32)}
    parallel = autopar.parallelize(step, cluster=autopar.Cluster(1, 2, SLOW, QUICK), method=method, batch_argnums=(1,))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        plan = parallel.plan(stack, BATCH)
    assert plan.num_microbatches == (num_microbatches or 8)
    assert [text in str(w.message) for w in found if "far from even" in str(w.message)] == [True] * bool(text)


def test_own_microbatches_that_are_not_the_whole_batch():
    """Another part is taken before the loop, whose trips are then no number that the batch divides into."""

    def step(params, batch):
        grad = jax.grad(lambda params, part: jnp.mean(layers(params, part) ** 2))
        grads, _ = jax.lax.scan(
            lambda total, part: (jax.tree.map(jnp.add, total, grad(params, part)), None),
            grad(params, 2 * batch[:8]),
            batch[8:].reshape(3, 8, WIDTH),
        )
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    stack = {"layers": jax.ShapeDtypeStruct((NUM_LAYERS, WIDTH, WIDTH), np.float32)}
    cluster, method = autopar.Cluster(1, 2, SLOW, QUICK), autopar.PipelineParallel(num_stages=2)
    with pytest.warns(UserWarning, match="far from even") as found:
        plan = autopar.parallelize(step, cluster=cluster, method=method, batch_argnums=(1,)).plan(stack, BATCH)
    assert plan.num_microbatches == 8 and not any("with num_microbatches" in str(w.message) for w in found)
