"""What a stage's tasks take of memory, beside their operands."""

import jax
import jax.numpy as jnp

import autopar
from autopar import Cluster, PipelineParallel

LAYERS, WIDTH, ROWS = 8, 256, 16


def train_step(weights, x):
    def loss_of(weights):
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.mean(h * h)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss_of)(weights))


def test_gradients_are_added_up_in_place_and_where_they_are_made():
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    method = PipelineParallel(num_stages=2, num_microbatches=2)
    step = autopar.parallelize(train_step, cluster=Cluster.of("2 h100"), method=method, batch_argnums=(1,))
    pipeline = step.plan([array(WIDTH, WIDTH)] * LAYERS, array(ROWS, WIDTH)).attached.pipeline
    weight = WIDTH * WIDTH * 4
    for stage in pipeline.stages:
        back, update = stage.task("B") or stage.task("W"), stage.task("U")
        sums = [b.num_bytes for b in back.outputs if b.kind == "sum"]
        assert sums == [weight] * (LAYERS // 2)
        assert weight <= back.working_bytes < 2 * weight  # one gradient, until it is added
        # New weights take the memory of the old.
        taken = [update.inputs[k].num_bytes for k in pipeline.streams.overwritten[update.task.name]]
        assert sum(taken) == sum(sums) and update.working_bytes < weight
