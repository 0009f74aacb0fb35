"""A plan as workers carry it out: no equations, no devices, nothing that cannot be sent.

In:     a `StepPlan`.
Out:    `Job`: programs as serialized StableHLO, streams of instructions, the type of every buffer.
Method: each program is traced over a mesh that has no devices yet and exported by `jax.export`; workers compile it for
        theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar.mesh import ArrayType
from autopar.partition.host_calls import Watch
from autopar.partition.shipped import Shipment
from autopar.partition.task import DeviceProgram, abstract_mesh, device_program, jitted, structs
from autopar.runtime.ray.functions import packed_calls
from autopar.runtime.ray.pauses import find_pauses
from autopar.runtime.ray.seats import Layout
from autopar.streams.assemble import StepPlan
from autopar.streams.instructions import BufferId, Instruction, MeshId


@dataclass(frozen=True, slots=True)
class Entry:
    """An argument that is there when a step begins.

    Attributes:
        argument: Its position among the flat arguments.
        buffer: Which buffer holds it.
        is_piece: Whether it is put there with a leading dim of microbatches.
    """

    argument: int
    buffer: BufferId
    is_piece: bool


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A step as its workers carry it out.

    Attributes:
        layout: The devices of each mesh.
        programs: Of each mesh.
        streams: Of each mesh.
        types: Of each buffer.
        mesh_of: Of each buffer.
        microbatch_of: Of each buffer; -1: none.
        numbers: Buffers that hold a microbatch's number, and which.
        entries: Arguments.
        results: For each result its buffer; None: it is a constant.
        home: For each argument the mesh at which it lives.
        donated: For each argument, whether its memory is taken over.
        callbacks: Of the programs of each mesh, packed (`functions.py`).
        pauses: Where each mesh's stream waits to hear that no callback has raised; empty: nowhere.
    """

    layout: Layout
    programs: Mapping[MeshId, tuple[DeviceProgram[bytes], ...]]
    streams: Mapping[MeshId, tuple[Instruction, ...]]
    types: tuple[ArrayType, ...]
    mesh_of: tuple[MeshId, ...]
    microbatch_of: tuple[int, ...]
    numbers: Mapping[BufferId, int]
    entries: tuple[Entry, ...]
    results: tuple[BufferId | None, ...]
    home: tuple[MeshId, ...]
    donated: tuple[bool, ...]
    callbacks: Mapping[MeshId, bytes]
    pauses: Mapping[MeshId, int]


def make_job(planned: StepPlan, platform: str) -> Job:
    """The job of a step.

    Args:
        planned: Its plan.
        platform: Of the devices, as `jax.export` names it.
    """
    streams, stages, invars = planned.streams, planned.stages, planned.program.jaxpr.invars
    meshes = list(streams.instructions)
    programs: dict[MeshId, list[DeviceProgram[bytes]]] = {mesh: [] for mesh in meshes}
    shipments: dict[MeshId, dict[str, Shipment]] = {mesh: {} for mesh in meshes}
    watches = {mesh: Watch() for mesh in meshes}
    for number, stage in enumerate(stages):
        places, at = abstract_mesh(stage.mesh), number % len(meshes)
        for task in stage.tasks:
            name = task.task.name
            shipment = shipments[at][name] = Shipment(platform)
            over = streams.overwritten[name]
            made = device_program(task, stage.mesh, places, over, watches[at], platform, shipment.bind)
            code = exported(jitted(made, places), structs(made.inputs, places), platform)
            rest = made.inputs, made.outputs, made.donated, made.calls_host, made.options
            programs[at].append(DeviceProgram(name, code, *rest))
    position = {var: k for k, var in enumerate(invars)}
    entries = [Entry(position[var], at, False) for (var, _), at in streams.arguments.items()]
    entries += [Entry(position[var], at, True) for (var, _), at in streams.pieces.items()]
    return Job(
        layout=tuple((planned.first_device[m], stages[m].mesh.num_devices) for m in meshes),
        programs={mesh: tuple(own) for mesh, own in programs.items()},
        streams=streams.instructions,
        types=tuple(b.type.array for b in streams.buffers),
        mesh_of=tuple(b.mesh for b in streams.buffers),
        microbatch_of=tuple(b.microbatch for b in streams.buffers),
        numbers={at: microbatch for (_, microbatch), at in streams.numbers.items()},
        entries=tuple(entries),
        results=streams.results,
        home=tuple(planned.home.get(var, 0) % len(meshes) for var in invars),
        donated=tuple(planned.roles.donated),
        callbacks={
            mesh: packed_calls(watches[mesh], {name: s.callbacks for name, s in own.items()})
            for mesh, own in shipments.items()
        },
        pauses=find_pauses(streams) if any(p.calls_host for own in programs.values() for p in own) else {},
    )


def exported(function: Callable[..., Any], arguments: Sequence[Any], platform: str) -> bytes:
    """A jitted function as bytes that a worker can compile."""
    # Driver and workers have one version of JAX, so that calls of its own libraries mean the same to both.
    every = jax.export.DisabledSafetyCheck.custom_call("ALL")
    made = jax.export.export(function, platforms=(platform,), disabled_checks=(every,))(*arguments)
    return bytes(made.serialize())
