"""Weighs segments in seconds on the devices of one stage, so that balanced stages take equally long.

In:     `CutStep`, the number of devices of a stage, the device.
Out:    `CutStep` whose segments' work is seconds of one microbatch.
Method: each operation at its fastest sharding on a mesh of two axes, by the cost model of plans, without communication. So
        memory-bound operations (a softmax over the vocabulary, norms) and launches of small ones count. On a single axis of
        thousands of devices, operations without a dim that divides by it would not be split, and a head would weigh more
        than all layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from autopar._jax import Jaxpr, JaxprEqn, make_jaxpr
from autopar.inter_op.cut import CutStep
from autopar.intra_op.build_graph import build_graph
from autopar.intra_op.costs import operation_seconds
from autopar.intra_op.graph import Graph, Tables
from autopar.ir.dataflow import makers, read_by
from autopar.ir.region import bodies_of, is_region
from autopar.mesh import Device, LogicalMesh


def weigh_segments(cut: CutStep, num_devices: int, device: Device) -> CutStep:
    """Replace the work of a step's segments by seconds."""
    loop = cut.chain.loop
    pieces = {k: cut.batch.dims(var) for k, var in enumerate(loop.invars) if cut.batch.dims(var)}
    graph = build_graph(loop, _two_axes(num_devices), {}, pieces)
    seconds = tuple(_seconds_of(loop, operation_seconds(graph, device)))
    return dataclasses.replace(cut, chain=dataclasses.replace(cut.chain, work_of=seconds))


class LayerKernels:
    """Seconds of layers on any number of devices, as `weigh_segments` weighs them.

    What does not depend on the number of devices is computed once; for equal layers, ask for one of them.
    """

    def __init__(self, cut: CutStep, borders: Sequence[int], device: Device):
        """`borders`: first segment of each layer."""
        self._cut, self._device = cut, device
        self._ends = dict(zip(borders, [*borders[1:], cut.chain.num_segments], strict=True))
        self._programs: dict[int, tuple[Jaxpr, dict[int, frozenset[int]]]] = {}
        self._graphs: dict[int, Graph] = {}
        self._tables: dict[int, Tables] = {}

    def seconds(self, first: int, num_devices: int) -> float:
        """Seconds of one microbatch of the layer that begins with segment `first`, on so many devices."""
        if first not in self._programs:
            self._programs[first] = self._program(first)
        jaxpr, batch = self._programs[first]
        mesh, tables = _two_axes(num_devices), self._tables.setdefault(num_devices, Tables())
        graph = build_graph(jaxpr, mesh, {}, batch, like=self._graphs.get(first), tables=tables)
        found = sum(operation_seconds(graph, self._device).values())
        self._graphs.setdefault(first, graph)
        return found

    def _program(self, first: int) -> tuple[Jaxpr, dict[int, frozenset[int]]]:
        """The layer as a program, and its inputs' dims that run over samples."""
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
    """A mesh of two axes, as equal as possible."""
    side = next(n for n in range(math.isqrt(num_devices), 0, -1) if num_devices % n == 0)
    return LogicalMesh((num_devices // side, side))


def _seconds_of(jaxpr: Jaxpr, seconds: Mapping[JaxprEqn, float]) -> list[float]:
    """Seconds of each equation; `seconds` are those of equations without bodies."""
    return [
        sum(sum(_seconds_of(body, seconds)) for body in bodies_of(eqn)) if is_region(eqn) else seconds.get(eqn, 0.0)
        for eqn in jaxpr.eqns
    ]
