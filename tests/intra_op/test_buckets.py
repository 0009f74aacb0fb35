"""Where nothing fits with one message of all gradients, several are sent; where there is room, one is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar._jax import new_var, shaped
from autopar.cost.steps import AllReduce
from autopar.intra_op.buckets import smaller_bucket
from autopar.intra_op.liveness import measure_liveness
from autopar.intra_op.sharded import BUCKET_BYTES, Body, Fused, Move
from autopar.mesh import LogicalMesh, Sharding
from autopar.tuning import TUNING
from tests.small_mlp import train_step

WIDTH, LAYERS, ROWS = 256, 4, 64
FAST = autopar.Cluster.of("8 h100")


def arguments(array):
    return [array(WIDTH, WIDTH) for _ in range(LAYERS)], {"x": array(ROWS, WIDTH), "y": array(ROWS, WIDTH)}


def step(budget=None, cluster=FAST):
    method = autopar.DataParallel(zero=3, memory_budget_bytes=budget)
    return autopar.parallelize(train_step, cluster=cluster, method=method)


@pytest.fixture(scope="module")
def free():
    return step().plan(*arguments(lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)))


def sent(plan):
    """The messages of gradients, and the number of gradients in each."""
    body = plan.attached.pipeline.stages[0].sharded.body
    messages = [i.moves for i in body.instructions if isinstance(i, Fused) and "Reduce" in str(i.moves[0].step)]
    return [sum(move.var.aval.shape == (WIDTH, WIDTH) for move in moves) for moves in messages]


def test_many_small_gradients_are_scattered():
    """Each alone is faster as an all-reduce; the message of all is not, and devices keep an eighth of it."""
    shapes = (
        [jax.ShapeDtypeStruct((384, 384), jnp.float32)] * 48,
        dict.fromkeys("xy", jax.ShapeDtypeStruct((ROWS, 384), jnp.float32)),
    )
    plan = step().plan(*shapes)
    assert {c.kind: c.bytes for c in plan.cost.collectives} == {
        "all-gather": 48 * 4 * 384**2,
        "reduce-scatter": 48 * 4 * 384**2,
        "all-reduce": 4,
    }


@pytest.mark.parametrize("part", [0.6, 0.45])
def test_what_fits_with_smaller_messages_only(free, part):
    assert sent(free) == [LAYERS] and free.stages[0].bucket_bytes == BUCKET_BYTES
    budget = part * free.cost.peak_bytes[0]
    small = step(budget).plan(*arguments(lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)))
    assert max(small.cost.peak_bytes) <= budget and not small.offloaded_activations
    assert small.stages[0].bucket_bytes < BUCKET_BYTES and LAYERS not in sent(small)
    assert small.cost.step_seconds < 1.2 * free.cost.step_seconds


def test_a_plan_from_a_file_sends_the_same_messages(free, tmp_path):
    random = np.random.default_rng(0)
    given = arguments(lambda *shape: random.standard_normal(shape, np.float32) / 8)
    cluster = autopar.Cluster.local(jax.devices()[:8], device=FAST.device, intra=FAST.intra)
    there = step(0.6 * free.cost.peak_bytes[0], cluster)
    plan = there.plan(*given)
    assert plan.stages[0].bucket_bytes < BUCKET_BYTES
    plan.save(tmp_path / "plan.json")
    read = autopar.Plan.load(tmp_path / "plan.json")
    compiled = there.compile(*given, plan=read)
    assert compiled.plan.stages == plan.stages and sent(compiled.plan) == sent(plan)
    wanted = jax.jit(train_step)(*given)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), compiled(*given), wanted)


def test_only_messages_that_take_part_in_the_fullest_moment_get_smaller():
    mesh, (held, free) = LogicalMesh((2,)), (Sharding(((),), ("x",)), Sharding(((),)))
    moves = [
        Move(new_var(shaped(jax.ShapeDtypeStruct((size,), np.float32))), held, free, AllReduce(("x",)))
        for size in (96, 32)
    ]
    other = new_var(shaped(jax.ShapeDtypeStruct((1 << 20,), np.float32)))

    def moment(*inputs):
        body = Body((*((m.var, m.source) for m in moves), *inputs), (Fused(tuple(moves)),), ())
        return measure_liveness(body, mesh, {})

    assert smaller_bucket(moment(), mesh) == 4 * (96 + 32) // TUNING.bucket_step
    together = 2 * 4 * (96 + 32)  # partial sums, and sums
    assert smaller_bucket(moment(), mesh, together - 1)
    assert smaller_bucket(moment(), mesh, together) is None, "they hold no more than is to be saved"
    assert smaller_bucket(moment((other, free)), mesh) is None
