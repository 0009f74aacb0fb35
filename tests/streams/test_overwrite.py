"""Which operands' memory results take: sums in place, new state where the old was, and nothing that the user keeps."""

import jax
import jax.numpy as jnp

import autopar
from autopar import Cluster, Device, Link, PipelineParallel

CLUSTER = Cluster(1, 2, Device("toy", 1e9, 1e9, 1e9), Link(1e-6, 1e9), Link(1e-6, 1e9))
BATCH = jax.ShapeDtypeStruct((16, 8), jnp.float32)
WEIGHTS = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 2


def train_step(weights, batch):
    def loss_of(weights):
        return jnp.mean((jnp.tanh(batch @ weights[0]) @ weights[1]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(weights)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], loss


def decode(caches, weights, batch):
    new = [jnp.roll(cache, 1, axis=1) + 1 for cache in caches]
    return new, jnp.tanh(batch @ weights[0] + new[0]) @ weights[1] + new[1]


def taken(step, *args, num_microbatches=2, **options):
    """Per kind of task, the kinds of values whose memory its programs take."""
    method = PipelineParallel(num_stages=2, num_microbatches=num_microbatches)
    streams = autopar.parallelize(step, cluster=CLUSTER, method=method, **options).plan(*args).origin.pipeline.streams
    found = {}
    for name, positions in streams.overwritten.items():
        plan = streams.programs[name]
        operands = (*plan.inputs, *plan.written_rows)
        found.setdefault(plan.task.kind, set()).update(operands[k].kind for k in positions)
        results = [value.type for value in plan.outputs]
        for k in positions:  # each takes the memory of one of its own type
            results.remove(operands[k].type)
    return found


def test_a_step_that_trains_overwrites_state_in_its_update_alone():
    found = taken(train_step, WEIGHTS, BATCH)
    assert found["U"] == {"argument"}
    assert found["B"] == {"sum"} and found["F"] <= {"sum"}


def test_what_the_user_keeps_stays():
    found = taken(train_step, WEIGHTS, BATCH, donate_argnums=())
    assert found["U"] == set() and found["B"] == {"sum"}


def test_without_gradients_what_is_read_last_is_taken():
    caches = [BATCH, BATCH]
    given = dict(batch_argnums=(2,), num_microbatches=1)
    found = taken(decode, caches, WEIGHTS, BATCH, donate_argnums=(0,), **given)
    kept = taken(decode, caches, WEIGHTS, BATCH, donate_argnums=(), **given)
    assert any("argument" in kinds for kinds in found.values())
    assert not any("argument" in kinds for kinds in kept.values())
