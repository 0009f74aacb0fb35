"""Of plans that cost the same, the one whose collectives are along first dims, which compilers need not turn arrays for."""

import jax
import jax.numpy as jnp

import autopar
from autopar.cost.steps import AllGather
from autopar.intra_op.sharded import Fused, Move, Region

LAYERS, WIDTH, HIDDEN, BATCH = 4, 256, 1024, 4096


def train_step(params, x):
    def loss_of(params):
        def layer(x, w):
            return x + jnp.tanh(x @ w["up"]) @ w["down"], None

        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_of)(params))


def gathered_dims(body):
    """Of matrices, in loops too."""
    for instruction in body.instructions:
        if isinstance(instruction, Region):
            for inner in instruction.bodies:
                yield from gathered_dims(inner)
        for move in instruction.moves if isinstance(instruction, Fused) else (instruction,):
            if isinstance(move, Move) and isinstance(move.step, AllGather) and move.var.aval.ndim == 2:
                yield move.step.dim


def test_weights_are_gathered_along_their_first_dim():
    shapes = {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    budget = 4 * sum(LAYERS * WIDTH * HIDDEN * 4 for _ in shapes) // 8 + BATCH // 8 * HIDDEN * 24
    method = autopar.ShardParallel(mesh_shape=(2, 4), memory_budget_bytes=budget)
    step = autopar.parallelize(train_step, cluster=autopar.Cluster.of("8 h100"), method=method, batch_argnums=(1,))
    plan = step.plan(params, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32))
    (stage,) = plan.attached.pipeline.stages
    assert set(gathered_dims(stage.tasks[0].body)) == {0}
