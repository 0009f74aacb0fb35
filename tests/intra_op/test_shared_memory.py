"""Where devices share a memory: what is packed is copied, and what is sent lies in one piece."""

import autopar
from autopar.cost.steps import AllGather, ReduceScatter
from autopar.intra_op.fuse import small_bytes
from autopar.intra_op.sharded import Fused, Move
from autopar.mesh import Cluster, Link, LogicalMesh
from tests.small_mlp import make_batch, make_params, train_step

SHARED = Link(5e-6, 5e9, shared_memory=True)


def test_packing_must_cost_less_than_it_saves():
    wires, shared = LogicalMesh((8,), links=(Link(5e-6, 5e9),)), LogicalMesh((8,), links=(SHARED,))
    assert small_bytes(wires) == 4 << 20
    assert small_bytes(shared) == 8 * 5e-6 * 5e9 / 4


def test_gradients_are_scattered_along_their_first_dim():
    """Along another one XLA's CPU collectives would be of transposed copies."""
    cluster = Cluster(hosts=1, devices_per_host=8, intra=SHARED)
    step = autopar.parallelize(train_step, cluster=cluster, method=autopar.DataParallel(zero=3))
    plan = step.plan(make_params(2, 256), make_batch(64, 256))
    stages = plan.attached.pipeline.stages
    instructions = [i for stage in stages for task in stage.tasks for i in task.body.instructions]
    moves = [i for i in instructions if isinstance(i, Move)]
    scattered = [move.step.dim for move in moves if isinstance(move.step, ReduceScatter) and move.var.aval.ndim == 2]
    assert scattered and set(scattered) == {0}
    assert not any(isinstance(i, Fused) and isinstance(i.moves[0].step, AllGather) for i in instructions)
