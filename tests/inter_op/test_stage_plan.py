"""What a stage's tasks take of memory, beside their operands."""

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar import Cluster, PipelineParallel, ThreeD

LAYERS, WIDTH, ROWS = 8, 256, 16


def train_step(weights, x):
    def loss_of(weights):
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.mean(h * h)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss_of)(weights))


def planned(method, devices):
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    step = autopar.parallelize(train_step, cluster=Cluster.of(devices), method=method, batch_argnums=(1,))
    return step.plan([array(WIDTH, WIDTH)] * LAYERS, array(ROWS, WIDTH)).attached.pipeline


def test_gradients_are_added_up_in_place_and_where_they_are_made():
    pipeline = planned(PipelineParallel(num_stages=2, num_microbatches=2), "2 h100")
    weight = WIDTH * WIDTH * 4
    for stage in pipeline.stages:
        back, update = stage.task("B") or stage.task("W"), stage.task("U")
        sums = [b.num_bytes for b in back.outputs if b.kind == "sum"]
        assert sums == [weight] * (LAYERS // 2)
        assert weight <= back.working_bytes < 2 * weight  # one gradient, until it is added
        # New weights take the memory of the old.
        taken = [update.inputs[k].num_bytes for k in pipeline.streams.overwritten[update.task.name]]
        assert sum(taken) == sum(sums) and update.working_bytes < weight


def test_a_sum_leaves_where_it_entered():
    """In the order of the operands whose memory they take, and of their shape on each device, they are not copied."""
    pipeline = planned(ThreeD(data=2, pipeline=2, num_microbatches=2), "4 h100")
    for stage in pipeline.stages:
        back = stage.task("B") or stage.task("W")
        before, after = ([b for b in part if b.kind == "sum"] for part in (back.inputs, back.outputs))
        assert [b.key for b in before] == [b.key for b in after] and len(after) == LAYERS // 2
        for value in after:
            parts = value.type.array
            assert parts.sharding.local_shape(parts.shape, parts.mesh) == (WIDTH, WIDTH)
            assert parts.shape == (2 * WIDTH, WIDTH) and value.type.sharding.partial


def test_weights_are_read_as_they_lie():
    """What comes before the loop makes no copy of them, and where it has nothing to make there is no such program."""
    pipeline = planned(PipelineParallel(num_stages=2, num_microbatches=2), "2 h100")
    for stage in pipeline.stages:
        assert [value.kind for value in stage.task("init").outputs] == ["sum"] * (LAYERS // 2)
        weights = [value for value in stage.task("F").inputs if value.kind == "argument"]
        assert len(weights) == LAYERS // 2 and not any(v.kind == "const" for t in stage.tasks for v in t.inputs)
        assert {v.key for v in weights} <= {v.key for v in stage.task("U").inputs}


def test_what_lies_otherwise_than_the_loop_wants_it_is_made_once():
    """Weights that are split, and gathered before the loop: copies of those, and of nothing else."""
    pipeline = planned(ThreeD(data=2, pipeline=2, num_microbatches=2, zero=3), "4 h100")
    for stage in pipeline.stages:
        first = stage.task("init")
        given = {value.key: value.type for value in first.inputs}
        copies = [value for value in first.outputs if value.kind == "const"]
        assert len(copies) == LAYERS // 2 and all(given[copy.var] != copy.type for copy in copies)


@pytest.mark.parametrize("num_stages, num_arrays", [(1, 3 + 2), (2, 23)])
def test_each_array_that_a_program_takes_or_makes_takes_time(num_stages, num_arrays):
    """On devices that share their host's cores, which hand over every one of them."""

    def step(params, x):
        def loss(params):
            return jnp.mean((jnp.tanh(x @ params[0]) @ params[1]) ** 2)

        return [p - g for p, g in zip(params, jax.grad(loss)(params), strict=True)]

    def seconds(each):
        device = autopar.Device("cpu", 1e12, achieved=autopar.mesh.Achieved(host_cores=num_stages, array_seconds=each))
        cluster = autopar.Cluster(1, num_stages, device, autopar.Link(0.0, 1e12), autopar.Link(0.0, 1e12))
        shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
        method = autopar.PipelineParallel(num_stages, num_microbatches=1) if num_stages > 1 else None
        plan = autopar.parallelize(step, cluster=cluster, method=method).plan([shape, shape], shape)
        return sum(task.seconds for stage in plan.attached.pipeline.stages for task in stage.tasks)

    assert seconds(1.0) - seconds(0.0) == pytest.approx(num_arrays)
