"""Segments weighed in seconds: what their operations take on the devices of one stage, so that even stages take as long.

In:     `CutStep`, how many devices a stage has, what one is.
Out:    `CutStep`, the work of whose segments is seconds of one microbatch.
Method: each operation at its fastest on one axis of so many devices, by the cost model that plans are priced with, nobody
        communicating. Operations that move bytes (a softmax over the vocabulary, norms) take their time though they compute
        little, and small ones their launch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from autopar._jax import Jaxpr
from autopar.inter_op.cut import CutStep
from autopar.intra_op.costs import operation_seconds
from autopar.intra_op.graph import build_graph
from autopar.ir.region import bodies_of, is_region
from autopar.mesh import Device, LogicalMesh


def weigh_segments(cut: CutStep, num_devices: int, device: Device) -> CutStep:
    """The step with seconds as the work of its segments.

    Args:
        cut: The step.
        num_devices: Of a stage.
        device: Rates of one.
    """
    loop = cut.chain.loop
    pieces = {k: cut.batch.dims(var) for k, var in enumerate(loop.invars) if cut.batch.dims(var)}
    graph = build_graph(loop, LogicalMesh((num_devices,)), {}, pieces)
    seconds = _seconds_of(loop, operation_seconds(graph, device))
    work = np.zeros(cut.chain.num_segments)
    for segment, time in zip(cut.chain.segment, seconds, strict=True):
        if segment >= 0:
            work[segment] += time
    return dataclasses.replace(cut, chain=dataclasses.replace(cut.chain, work=work))


def _seconds_of(jaxpr: Jaxpr, seconds: Mapping[int, float]) -> list[float]:
    """Of each equation, all runs of what is inside it counted; `seconds` are those of plain ones, by identity."""
    return [
        sum(sum(_seconds_of(body, seconds)) for body in bodies_of(eqn)) if is_region(eqn) else seconds.get(id(eqn), 0.0)
        for eqn in jaxpr.eqns
    ]
