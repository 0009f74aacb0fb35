"""Turns a plan into a job for workers, whose programs can be sent to other processes.

In:     a `StepPlan`.
Out:    `Job`: the plan with its programs as serialized StableHLO; each worker gets its share.
Method: each program is traced over an abstract mesh, without devices, and exported by `jax.export`; workers compile it for
        their devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from autopar.mesh import ArrayType
from autopar.partition.host_calls import Shipment, Watch
from autopar.partition.task import DeviceProgram, abstract_mesh, device_program, jitted
from autopar.runtime.ray.functions import packed_calls
from autopar.runtime.ray.seats import Layout
from autopar.streams.assemble import StepPlan
from autopar.streams.instructions import MeshId, Recv, Run, Send, Streams


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A step, for its workers to execute.

    Attributes:
        planned: The step.
        layout: The devices of each mesh.
        programs: The programs of each mesh.
        types: The array type of each buffer.
        home: The mesh that holds each argument.
        callbacks: The callbacks of the programs of each mesh, pickled (`functions.py`).
        pauses: The position at which each mesh's stream waits for word that no callback has raised; empty: nowhere.
    """

    planned: StepPlan
    layout: Layout
    programs: Mapping[MeshId, tuple[DeviceProgram[bytes], ...]]
    types: tuple[ArrayType, ...]
    home: tuple[MeshId, ...]
    callbacks: Mapping[MeshId, bytes]
    pauses: Mapping[MeshId, int]

    @property
    def streams(self) -> Streams:
        """The instruction streams of the meshes."""
        return self.planned.streams


def make_job(planned: StepPlan, platform: str) -> Job:
    """The job of a step, for devices of a platform as `jax.export` names it."""
    streams, stages = planned.streams, planned.stages
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
            code = exported(*jitted(made, partial(ArrayType.on, places=places), donates=False), platform)
            rest = made.inputs, made.outputs, made.donated, made.calls_host, made.options
            programs[at].append(DeviceProgram(name, code, *rest))
    return Job(
        planned=planned,
        layout=tuple((planned.first_device[m], stages[m].mesh.num_devices) for m in meshes),
        programs={mesh: tuple(own) for mesh, own in programs.items()},
        types=tuple(b.value.type.array for b in streams.buffers),
        home=tuple(planned.home.get(var, 0) % len(meshes) for var in planned.program.jaxpr.invars),
        callbacks={
            mesh: packed_calls(watches[mesh], {name: s.callbacks for name, s in own.items()})
            for mesh, own in shipments.items()
        },
        pauses=find_pauses(streams) if any(p.calls_host for own in programs.values() for p in own) else {},
    )


def find_pauses(streams: Streams) -> dict[MeshId, int]:
    """The position in each stream, before its first update, at which meshes wait for each other; empty: they cannot.

    If a callback has raised by then, the step is abandoned, and its arguments can be used again. This requires that nothing
    before the first updates needs a message from behind them, or overwrites an argument.
    """
    updates = {name for name, plan in streams.programs.items() if plan.task.kind in ("U", "step")}
    pauses = {
        mesh: next((k for k, i in enumerate(own) if isinstance(i, Run) and i.program in updates), len(own))
        for mesh, own in streams.instructions.items()
    }
    given = {at for _, at in streams.arguments}
    before = [i for mesh, own in streams.instructions.items() for i in own[: pauses[mesh]]]
    sent = {i.message for i in before if isinstance(i, Send)}
    waits = any(isinstance(i, Recv) and i.message not in sent for i in before)
    overwrites = any(i.inputs[k] in given for i in before if isinstance(i, Run) for k in streams.overwritten[i.program])
    return {} if not before or waits or overwrites else pauses


def exported(function: Callable[..., Any], arguments: Sequence[Any], platform: str) -> bytes:
    """A jitted function as serialized StableHLO."""
    # Driver and workers have the same version of JAX, so custom calls mean the same to both.
    every = jax.export.DisabledSafetyCheck.custom_call("ALL")
    made = jax.export.export(function, platforms=(platform,), disabled_checks=(every,))(*arguments)
    return bytes(made.serialize())
