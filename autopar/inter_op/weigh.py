"""Segments weighed in seconds: what their operations take on the devices of one stage, so that even stages take as long.

In:     `CutStep`, how many devices a stage has, what one is.
Out:    `CutStep`, the work of whose segments is seconds of one microbatch.
Method: each operation at its fastest on two axes of so many devices, by the cost model that plans are priced with, nobody
        communicating. Operations that move bytes (a softmax over the vocabulary, norms) take their time though they compute
        little, and small ones their launch. On one axis of thousands of devices, what has no dim that divides by so many
        would stay whole, and a head weigh more than all layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from autopar._jax import Jaxpr, JaxprEqn, make_jaxpr
from autopar.inter_op.cut import CutStep
from autopar.intra_op.build_graph import build_graph
from autopar.intra_op.costs import operation_seconds
from autopar.ir.dataflow import makers, read_by
from autopar.ir.region import bodies_of, is_region
from autopar.mesh import Device, LogicalMesh


def weigh_segments(cut: CutStep, num_devices: int, device: Device) -> CutStep:
    """The step with seconds as the work of its segments."""
    loop = cut.chain.loop
    pieces = {k: cut.batch.dims(var) for k, var in enumerate(loop.invars) if cut.batch.dims(var)}
    graph = build_graph(loop, _two_axes(num_devices), {}, pieces)
    seconds = _seconds_of(loop, operation_seconds(graph, device))
    work = np.zeros(cut.chain.num_segments)
    for segment, time in zip(cut.chain.segment, seconds, strict=True):
        if segment >= 0:
            work[segment] += time
    return dataclasses.replace(cut, chain=dataclasses.replace(cut.chain, work=work))


def layer_seconds(cut: CutStep, first: int, end: int, num_devices: int, device: Device) -> float:
    """Of one microbatch, what the segments from `first` to before `end` take on so many devices, as `weigh_segments` does."""
    loop, segment = cut.chain.loop, cut.chain.segment
    inside = [first <= at < end for at in segment]
    own = [eqn for eqn, here in zip(loop.eqns, inside, strict=True) if here]
    others = [eqn for eqn, here in zip(loop.eqns, inside, strict=True) if not here]
    made = makers(own)
    outside = [var for var in read_by(others, loop.outvars) if var in made]
    given = [var for var in read_by(own) if var not in made]
    batch = {k: cut.batch.dims(var) for k, var in enumerate(given) if cut.batch.dims(var)}
    graph = build_graph(make_jaxpr(given, outside, own), _two_axes(num_devices), {}, batch)
    return sum(operation_seconds(graph, device).values())


def _two_axes(num_devices: int) -> LogicalMesh:
    """So many devices on two axes that are as even as may be."""
    side = next(n for n in range(math.isqrt(num_devices), 0, -1) if num_devices % n == 0)
    return LogicalMesh((num_devices // side, side))


def _seconds_of(jaxpr: Jaxpr, seconds: Mapping[JaxprEqn, float]) -> list[float]:
    """Of each equation, all runs of what is inside it counted; `seconds` are those of plain ones."""
    return [
        sum(sum(_seconds_of(body, seconds)) for body in bodies_of(eqn)) if is_region(eqn) else seconds.get(eqn, 0.0)
        for eqn in jaxpr.eqns
    ]
