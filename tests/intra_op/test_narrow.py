"""What was made wider travels as narrow as it was, is the same to the last bit, and is counted so; sums are not."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from autopar import Cluster
from autopar.intra_op.build_graph import build_graph
from autopar.intra_op.fuse import fuse_collectives
from autopar.intra_op.lower import lower
from autopar.intra_op.sharded import Fused, Move, collectives_of
from autopar.ir.trace.trace import trace_step
from autopar.mesh import logical_mesh
from autopar.partition.program import run_body
from tests.draw import draw_choices
from tests.sweep import emitted_collectives

ROWS, WIDTH = 16, 24
SMALL = np.arange(ROWS * WIDTH).reshape(ROWS, WIDTH) % 7


def step(half, small):
    """Of what is made wider at once and in two steps, and moved between; of a sum in the wide dtype; of what is new."""
    wide = half.astype(jnp.float32)
    return {
        "turned": wide.T[None] * 3,
        "whole": small.astype(jnp.int16).T.astype(jnp.int32) + 1,
        "sum": jnp.sin(jnp.sum(wide, 0)),
        "scaled": (wide * jnp.float32(1.01)).T.reshape(-1),
    }


@pytest.mark.parametrize("seed", range(4))
def test_what_was_made_wider_travels_narrow(seed):
    arguments = (jnp.asarray(SMALL, jnp.bfloat16), jnp.asarray(SMALL, jnp.int8))
    program, mesh = trace_step(step, arguments), logical_mesh(Cluster.local(), (2, 4))
    graph = build_graph(program.jaxpr, mesh, {})
    body = fuse_collectives(lower(graph, draw_choices(graph, seed)), mesh)
    run = jax.shard_map(
        lambda *arrays: run_body(body, arrays, mesh.axis_sizes),
        mesh=jax.make_mesh(mesh.shape, mesh.axis_names, axis_types=(AxisType.Auto,) * 2),
        in_specs=tuple(s.partition_spec() for _, s in body.inputs),
        out_specs=[s.partition_spec() for _, s in body.outputs],
        check_vma=False,
    )
    found, wanted = jax.jit(run)(*arguments), jax.tree.leaves(jax.jit(step)(*arguments))
    for ours, plain in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(ours, plain)
    planned = Counter((c.kind, c.bytes) for c in collectives_of(body, mesh))
    emitted = Counter((kind, size) for kind, _, size, _ in emitted_collectives(jax.make_jaxpr(run)(*arguments).jaxpr))
    assert planned == emitted
    moves = [m for i in body.instructions for m in (i.moves if isinstance(i, Fused) else (i,)) if isinstance(m, Move)]
    assert any(m.narrow for m in moves) and not any(m.narrow and m.source.partial for m in moves)
