"""A function as a step would run it on one CPU device: its per-device program, and its kernels in the cost model.

In:     a function of arrays, their shapes.
Out:    the same function, interpreted as plans are; the kernels that a plan counts (`intra_op/traffic.py`).
Method: the function is traced and put on a mesh of one device. Programs of steps have the forms that compilers want
        (`ir/rules/on_platforms.py`), so that what is measured has to have them, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from autopar.cost.kernels import Kernel, MemoryPass
from autopar.intra_op.build_graph import build_graph
from autopar.intra_op.copied_rows import row_bytes
from autopar.intra_op.kernels import kernel_of
from autopar.intra_op.lower import lower
from autopar.intra_op.sharded import Region
from autopar.intra_op.traffic import find_traffic
from autopar.ir.region import trip_count
from autopar.ir.trace.trace import trace_step
from autopar.mesh import LogicalMesh
from autopar.partition.program import run_body

_ONE = LogicalMesh((1,))


def emitted(
    function: Callable[..., jax.Array],
    shapes: Sequence[tuple[int, ...]],
    dtype: str,
    batch: Mapping[int, frozenset[int]] | None = None,
    is_cpu: bool = True,
) -> tuple[Callable[..., Any], tuple[Kernel, ...]]:
    """The program of a function on one CPU device, and its kernels on a device that is one or not; `batch` as in
    `build_graph`."""
    given = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    graph = build_graph(trace_step(function, given).jaxpr, _ONE, {}, batch or {})
    body, traffic = lower(graph, [0] * len(graph.nodes)), find_traffic(graph)

    def run(*arrays: jax.Array) -> jax.Array:
        return run_body(body, arrays, _ONE.axis_sizes, "cpu")[0]

    found: list[Kernel] = []
    for node in graph.nodes:
        if node.kind == "op":
            kernel = kernel_of(node, node.strategies[0], traffic[node.index], _ONE)
            found += [kernel] * round(node.weight) if kernel.num_bytes else []
    loops = [i for i in body.instructions if is_cpu and isinstance(i, Region)]
    found += [MemoryPass(trip_count(loop.eqn) * row_bytes(loop, _ONE), 0.0, "parameters") for loop in loops]
    return run, tuple(found)
