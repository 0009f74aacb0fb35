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
from collections.abc import Mapping, Sequence

import numpy as np

from autopar._jax import Jaxpr, JaxprEqn, make_jaxpr
from autopar.inter_op.cut import CutStep
from autopar.intra_op.build_graph import build_graph
from autopar.intra_op.costs import operation_seconds
from autopar.intra_op.graph import Graph, Tables
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


class LayerKernels:
    """What layers take on any number of devices, as `weigh_segments` weighs them; what does not depend on it is found once.

    The same of equal layers, of which one is enough.
    """

    def __init__(self, cut: CutStep, borders: Sequence[int], device: Device):
        """`borders`: first segment of each layer."""
        self._cut, self._device = cut, device
        self._ends = dict(zip(borders, [*borders[1:], cut.chain.num_segments], strict=True))
        self._programs: dict[int, tuple[Jaxpr, dict[int, frozenset[int]]]] = {}
        self._graphs: dict[int, Graph] = {}
        self._tables: dict[int, Tables] = {}

    def seconds(self, first: int, num_devices: int) -> float:
        """Of one microbatch, what the layer that begins with this segment takes on so many devices."""
        if first not in self._programs:
            self._programs[first] = self._program(first)
        jaxpr, batch = self._programs[first]
        mesh, tables = _two_axes(num_devices), self._tables.setdefault(num_devices, Tables())
        graph = build_graph(jaxpr, mesh, {}, batch, like=self._graphs.get(first), tables=tables)
        found = sum(operation_seconds(graph, self._device).values())
        self._graphs.setdefault(first, graph)
        return found

    def _program(self, first: int) -> tuple[Jaxpr, dict[int, frozenset[int]]]:
        """The layer as a program, and the dims of its inputs that run over samples."""
        cut, chain, end = self._cut, self._cut.chain, self._ends[first]
        inside = [first <= at < end for at in chain.segment]
        own = [eqn for eqn, here in zip(chain.loop.eqns, inside, strict=True) if here]
        others = [eqn for eqn, here in zip(chain.loop.eqns, inside, strict=True) if not here]
        made = makers(own)
        outside = [var for var in read_by(others, chain.loop.outvars) if var in made]
        given = [var for var in read_by(own) if var not in made]
        batch = {k: cut.batch.dims(var) for k, var in enumerate(given) if cut.batch.dims(var)}
        return make_jaxpr(given, outside, own), batch


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
