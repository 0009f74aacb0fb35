"""Which dims of values run over samples."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct

from autopar.intra_op.build_graph import build_graph
from autopar.ir.trace.trace import trace_step
from autopar.mesh import LogicalMesh


@pytest.mark.parametrize(("batch_dim", "found"), [(0, frozenset()), (1, frozenset({0}))], ids=["by heads", "by time"])
def test_samples_behind_another_dim(batch_dim, found):
    """`[time, batch]` as rows can be split by data parallelism, `[heads, batch]` cannot: a shard would have other heads."""

    def rows(x):
        x = jnp.moveaxis(x, batch_dim, 1)  # [6, 4, 8]
        return x.reshape(-1, 8)

    shape = [6, 8]
    shape.insert(batch_dim, 4)
    program = trace_step(rows, [ShapeDtypeStruct(tuple(shape), "float32")]).jaxpr
    graph = build_graph(program, LogicalMesh((2,)), {}, {0: frozenset({batch_dim})})
    (result,) = program.outvars
    assert graph.batch.dims(result) == found
