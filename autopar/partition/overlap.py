"""Chooses XLA's compiler options for GPUs, so that collectives overlap with kernels as the plan assumes.

In:     the sharded program and its mesh.
Out:    options of this one compilation; nothing global is set.
Method: XLA's scheduler for GPUs starts collectives early and waits for them late; within a loop, only for collectives
        that are pipelined into the trip before or after. Gathers go into the trip before, with all that leads to them and not
        to what the loop carries: in a loop over microbatches that may be a whole forward pass, whose activations would then
        wait for a trip. Then gathers are not pipelined. Small collectives are combined up to a threshold on their
        results: for each kind the bytes that one trip of a loop makes, so that the gathers of one layer are combined,
        but not those of two, which would overlap with nothing. Where no loop sends a kind, or one sends more than a
        bucket, those that are too large for `fuse.py` stay apart, as they were placed. A program that copies to the
        host is not recorded as CUDA graphs. Flags that the user sets in `XLA_FLAGS` are left alone. Names: `xla.proto`
        (DebugOptions); NVIDIA, "Tips for High-Performance LLMs with JAX and XLA".
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import jax

from autopar._jax import takes_packed
from autopar.cost.steps import AllGather, CollectiveKind
from autopar.debug import xla_flags
from autopar.intra_op.fuse import small_bytes
from autopar.intra_op.host_order import copies_host
from autopar.intra_op.sharded import (
    Body,
    Collective,
    Compute,
    Copy,
    Fused,
    Move,
    Region,
    collectives_of,
    instructions_within,
    sent_in,
)
from autopar.intra_op.traffic import is_fused
from autopar.ir.region import kind_of, region_of
from autopar.mesh import LogicalMesh

Options = Mapping[str, bool | int]

GPU_PLATFORMS = ("gpu", "cuda", "rocm")
_NO_GRAPHS = 2**30
"""More commands than a CUDA graph can have: in a graph, copies to the host run one by one with kernels (seen on an H200)."""
_UNKNOWN = re.compile(r"No such compile option: '(\w+)'")
_KINDS: Mapping[CollectiveKind, tuple[str, str]] = {
    "all-reduce": ("xla_gpu_all_reduce_combine_threshold_bytes", "xla_gpu_enable_pipelined_all_reduce"),
    "all-gather": ("xla_gpu_all_gather_combine_threshold_bytes", "xla_gpu_enable_pipelined_all_gather"),
    "reduce-scatter": ("xla_gpu_reduce_scatter_combine_threshold_bytes", "xla_gpu_enable_pipelined_reduce_scatter"),
}


def overlap_options(body: Body, mesh: LogicalMesh) -> dict[str, bool | int]:
    """XLA's options for a program on GPUs; {} if it neither communicates nor copies to host memory."""
    trips = _trips(body)
    copies_rows = any(copies_host(i) for _, inner in trips for i in inner.instructions)
    copies = copies_rows or any(map(copies_host, body.instructions))
    if not (copies or any(True for _ in collectives_of(body, mesh))):
        return {}
    found: dict[str, bool | int] = {"xla_gpu_enable_latency_hiding_scheduler": True}
    if copies:
        found["xla_gpu_graph_min_graph_size"] = _NO_GRAPHS
    if copies_rows:
        found["xla_gpu_enable_pipelined_host_offloading"] = True
    for kind, (threshold, pipelined) in _KINDS.items():
        per_trip = max((_bytes_of(inner, mesh, kind) for _, inner in trips), default=0)
        if per_trip and not (kind == "all-gather" and any(_gathers_what_it_works_out(*trip) for trip in trips)):
            found[pipelined] = True
        if 0 < per_trip <= body.bucket:
            found[threshold] = per_trip
        elif sent := [c for c in collectives_of(body, mesh) if c.kind == kind]:
            small = int(min(small_bytes(mesh), body.bucket))
            found[threshold] = max(small * _made_bytes(c, mesh) // max(c.bytes, 1) for c in sent)
    if any(name.endswith("threshold_bytes") for name in found):
        # Combine gathers along different dims, too: weights are gathered along whatever dim they are split along.
        found["xla_gpu_enable_all_gather_combine_by_dim"] = False
        found["xla_gpu_enable_reduce_scatter_combine_by_dim"] = False
    return found


def compile_lowered(
    lowered: jax.stages.Lowered, options: Options, platform: str, given: Mapping[str, Any] | None = None
) -> jax.stages.Compiled:
    """Compile with `options` on GPUs, dropping those that this XLA does not know.

    `platform`: JAX's name of the devices' platform. `given`: options for every platform.
    """
    flags = xla_flags()
    chosen = {name: value for name, value in options.items() if platform in GPU_PLATFORMS and name not in flags}
    while chosen:
        try:
            return takes_packed(lowered.compile(compiler_options={**chosen, **(given or {})}))
        except jax.errors.JaxRuntimeError as error:
            unknown = _UNKNOWN.search(str(error))
            if unknown is None or chosen.pop(unknown[1], None) is None:
                raise
    return takes_packed(lowered.compile(compiler_options=dict(given) if given else None))


def _trips(body: Body) -> list[tuple[Region, Body]]:
    """All loops and their bodies, nested ones included."""
    regions = (i for i, _ in instructions_within(body) if isinstance(i, Region))
    return [(loop, inner) for loop in regions if kind_of(loop.eqn) in ("scan", "while") for inner in loop.bodies]


def _gathers_what_it_works_out(loop: Region, body: Body) -> bool:
    """Whether a trip gathers results of kernels that need nothing of what the loop carries."""
    parts = region_of(loop.eqn)
    entering = parts.entering(loop.bodies.index(body), parts.bindings)
    carried = {copy for b, copy in zip(entering, body.inputs, strict=True) if b.role == "carry"}
    worked_out: set[Copy] = set()
    for instruction in body.instructions:
        reads, makes = instruction.reads, instruction.makes
        if not carried.isdisjoint(reads):
            carried.update(makes)
        elif isinstance(instruction, Region) or (isinstance(instruction, Compute) and not is_fused(instruction)):
            worked_out.update(makes)
        elif not worked_out.isdisjoint(reads):
            if isinstance(instruction, Move | Fused) and isinstance(instruction.moves[0].step, AllGather):
                return True
            worked_out.update(makes)
    return False


def _bytes_of(body: Body, mesh: LogicalMesh, kind: CollectiveKind) -> int:
    """Bytes that one trip makes with collectives of a kind, outside of nested loops: thresholds count results."""
    return sum(_made_bytes(c, mesh) for i in body.instructions for c in sent_in(i, mesh) if c.kind == kind)


def _made_bytes(collective: Collective, mesh: LogicalMesh) -> int:
    """Bytes of a collective's result on one device."""
    parts = math.prod(mesh.size_of(axis) for axis in collective.axes) if collective.kind == "reduce-scatter" else 1
    return collective.bytes // parts
