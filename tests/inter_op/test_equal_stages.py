"""Equal stages are lowered once for the clock, and each for itself before anything runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import autopar
from autopar.inter_op.equal_stages import lowered, take_over
from autopar.inter_op.stage_tasks import read_as_given
from autopar.streams.assemble import all_lowered, assemble
from tests.small_mlp import train_step

CLUSTER = autopar.Cluster(1, 4, device=autopar.Device("d", 1e10, memory_bytes_per_second=1e10))


def planned():
    params = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 8
    batch = {name: jax.ShapeDtypeStruct((32, 16), jnp.float32) for name in ("x", "y")}
    method = autopar.PipelineParallel(num_stages=4, num_microbatches=4)
    plan = autopar.parallelize(train_step, cluster=CLUSTER, method=method, batch_argnums=1).plan(params, batch)
    return plan.origin.pipeline


def test_a_plan_holds_nothing_borrowed():
    assert not any(stage.borrowed for stage in planned().stages)


def borders_of(task):
    return [(slot.kind, slot.key, slot.var) for slot in (*task.inputs, *task.outputs)]


def test_renamed_tasks_keep_the_same_clock():
    pipeline = planned()
    middle = pipeline.stages[1]
    taken = take_over(pipeline.stages[2].program, middle, CLUSTER.device)
    own = read_as_given(pipeline.stages[2].program.tasks, middle.unchanged)
    assert taken.borrowed and middle.unchanged
    for found, task in zip(taken.tasks, own, strict=True):
        assert found.task.name == task.name and borders_of(found.task) == borders_of(task)
    stages = [*pipeline.stages[:2], taken, pipeline.stages[3]]
    again = assemble(pipeline.tasks, stages, CLUSTER, pipeline.schedule)
    assert again.simulation.seconds == pipeline.simulation.seconds
    assert again.simulation.peak_bytes == pipeline.simulation.peak_bytes
    own = lowered(taken, CLUSTER.device)
    assert not own.borrowed and own.sharded.graph is not middle.sharded.graph
    assert [t.seconds for t in own.tasks] == [t.seconds for t in taken.tasks]
    assert all_lowered(again, CLUSTER).seconds == pipeline.seconds
