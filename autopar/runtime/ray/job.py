"""A plan as workers carry it out: no equations, no devices, nothing that cannot be sent.

In:     the plan of a pipeline, or a sharded step without stages.
Out:    `Job`: programs as serialized StableHLO, streams of instructions, the type of every buffer.
Method: each program is traced over a mesh that has no devices yet and exported by `jax.export`; workers compile it for
        theirs. A step without stages is a stream of one instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from autopar._jax import Var
from autopar.intra_op.sharded import Body, calls_host
from autopar.ir.trace.state import Roles
from autopar.mesh import LogicalMesh, Sharding
from autopar.partition.host_calls import Watch, watched
from autopar.partition.program import global_program
from autopar.partition.shipped import Shipment
from autopar.partition.task import ArrayType, array_type, task_function
from autopar.runtime.overlap import overlap_options
from autopar.runtime.ray.functions import packed_calls
from autopar.runtime.ray.pauses import find_pauses
from autopar.runtime.ray.seats import Layout
from autopar.search.pipeline import PipelinePlan
from autopar.streams.instructions import BufferId, Instruction, MeshId, Run
from autopar.streams.transfers import Box, boxes


@dataclass(frozen=True, slots=True)
class BufferType:
    """A global array between programs.

    Attributes:
        shape: Of the whole.
        dtype: Its element type.
        sharding: How it lies on the mesh, every dim told; no partial sum (those have a leading dim).
        mesh: Which axes there are.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding
    mesh: LogicalMesh

    def on(self, places: jax.sharding.Mesh | AbstractMesh) -> NamedSharding:
        """As JAX has it, over these devices."""
        return NamedSharding(places, self.sharding.partition_spec())

    def boxes(self) -> list[Box]:
        """What each device holds, in mesh order."""
        return boxes(self.shape, self.sharding, self.mesh)

    @property
    def num_bytes(self) -> int:
        """Of the whole."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class ProgramCode:
    """A program that can be sent.

    Attributes:
        name: As in the streams.
        code: What `jax.export` makes of it.
        inputs: Types of its operands.
        outputs: Types of its results.
        donated: For each operand, whether its memory is taken over by a result.
        is_watched: It has callbacks that may raise: its last result, which no buffer holds, tells that it has ended.
        options: For XLA, where the worker has GPUs.
    """

    name: str
    code: bytes
    inputs: tuple[BufferType, ...]
    outputs: tuple[BufferType, ...]
    donated: tuple[bool, ...]
    is_watched: bool = False
    options: tuple[tuple[str, bool | int], ...] = ()


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
    programs: Mapping[MeshId, tuple[ProgramCode, ...]]
    streams: Mapping[MeshId, tuple[Instruction, ...]]
    types: tuple[BufferType, ...]
    mesh_of: tuple[MeshId, ...]
    microbatch_of: tuple[int, ...]
    numbers: Mapping[BufferId, int]
    entries: tuple[Entry, ...]
    results: tuple[BufferId | None, ...]
    home: tuple[MeshId, ...]
    donated: tuple[bool, ...]
    callbacks: Mapping[MeshId, bytes]
    pauses: Mapping[MeshId, int]


def pipeline_job(pipeline: PipelinePlan, platform: str) -> Job:
    """The job of a pipeline.

    Args:
        pipeline: Its plan.
        platform: Of the devices, as `jax.export` names it.
    """
    cut, streams, stages = pipeline.cut, pipeline.streams, pipeline.stages
    meshes = len(streams.instructions)
    programs: dict[MeshId, list[ProgramCode]] = {mesh: [] for mesh in streams.instructions}
    shipments: dict[MeshId, dict[str, Shipment]] = {mesh: {} for mesh in streams.instructions}
    watches = {mesh: Watch() for mesh in streams.instructions}
    for number, stage in enumerate(stages):
        places = abstract_mesh(stage.mesh)
        for plan in stage.tasks:
            name, at = plan.task.name, number % meshes
            shipment = shipments[at][name] = Shipment(platform)
            made = task_function(plan, places, streams.overwritten[name], watches[at], platform, shipment.bind)
            inputs, outputs = ([_buffer_type(t, stage.mesh) for t in own] for own in (made.inputs, made.outputs))
            is_watched = calls_host(plan.body)
            program = _program(
                made.function, name, stage.mesh, inputs, outputs, made.donated, is_watched, platform, plan.body
            )
            programs[at].append(program)
    position = {var: k for k, var in enumerate(cut.program.jaxpr.invars)}
    entries = [Entry(position[var], at, False) for (var, _), at in streams.arguments.items()]
    entries += [Entry(position[var], at, True) for (var, _), at in streams.pieces.items()]
    of_stage = pipeline.tasks.update.home
    return Job(
        layout=tuple((pipeline.first_device[m], stages[m].mesh.num_devices) for m in range(meshes)),
        programs={mesh: tuple(own) for mesh, own in programs.items()},
        streams=streams.instructions,
        types=tuple(
            _buffer_type(array_type(b.border, abstract_mesh(stages[b.stage].mesh)), stages[b.stage].mesh)
            for b in streams.buffers
        ),
        mesh_of=tuple(b.mesh for b in streams.buffers),
        microbatch_of=tuple(b.microbatch for b in streams.buffers),
        numbers={at: microbatch for (_, microbatch), at in streams.numbers.items()},
        entries=tuple(entries),
        results=streams.results,
        home=tuple(of_stage.get(var, 0) % meshes for var in cut.program.jaxpr.invars),
        donated=tuple(cut.roles.donated),
        callbacks={
            mesh: packed_calls(watches[mesh], {name: s.callbacks for name, s in own.items()})
            for mesh, own in shipments.items()
        },
        pauses=find_pauses(streams) if any(p.is_watched for own in programs.values() for p in own) else {},
    )


def step_job(
    body: Body, mesh: LogicalMesh, invars: Sequence[Var], roles: Roles, name: str, platform: str, num_devices: int
) -> Job:
    """The job of a step without stages.

    Args:
        body: The sharded step.
        mesh: Its mesh.
        invars: Its arguments.
        roles: Of these.
        name: Of the step.
        platform: As of `pipeline_job`.
        num_devices: Of the cluster.
    """
    places = abstract_mesh(mesh)
    avals = [var.aval for var in invars] + [atom.aval for atom, _ in body.outputs]
    types = tuple(
        BufferType(tuple(a.shape), np.dtype(a.dtype), Sharding(sharding.dims), mesh)
        for a, (_, sharding) in zip(avals, (*body.inputs, *body.outputs), strict=True)
    )
    count = len(invars)
    donated = tuple(roles.donated)
    watch, shipment = Watch(), Shipment(platform)
    function = global_program(watched(body, watch, name, None, shipment.bind), places, platform)
    program = _program(function, name, mesh, types[:count], types[count:], donated, calls_host(body), platform, body)
    results = tuple(range(count, len(types)))
    return Job(
        layout=((0, num_devices),),
        programs={0: (program,)},
        streams={0: (Run(name, 0, 0, tuple(range(count)), results),)},
        types=types,
        mesh_of=(0,) * len(types),
        microbatch_of=(-1,) * len(types),
        numbers={},
        entries=tuple(Entry(k, k, False) for k in range(count)),
        results=results,
        home=(0,) * count,
        donated=donated,
        callbacks={0: packed_calls(watch, {name: shipment.callbacks})},
        pauses={},
    )


def abstract_mesh(mesh: LogicalMesh) -> AbstractMesh:
    """A mesh as JAX has it before there are devices."""
    return AbstractMesh(mesh.shape, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.shape))


def exported(jitted: Callable[..., Any], arguments: Sequence[Any], platform: str) -> bytes:
    """A jitted function as bytes that a worker can compile."""
    # Driver and workers have one version of JAX, so that calls of its own libraries mean the same to both.
    every = jax.export.DisabledSafetyCheck.custom_call("ALL")
    made = jax.export.export(jitted, platforms=(platform,), disabled_checks=(every,))(*arguments)
    return bytes(made.serialize())


def _program(
    function: Callable[..., Any],
    name: str,
    mesh: LogicalMesh,
    inputs: Sequence[BufferType],
    outputs: Sequence[BufferType],
    donated: tuple[bool, ...],
    is_watched: bool,
    platform: str,
    body: Body,
) -> ProgramCode:
    ends = [BufferType((), np.dtype(np.int8), Sharding.replicated(0), mesh)] if is_watched else []

    def program(*arrays: jax.Array) -> list[jax.Array]:
        return [*function(*arrays), *(jnp.int8(0) for _ in ends)]

    program.__name__ = program.__qualname__ = name.replace("/", "_")
    places = abstract_mesh(mesh)
    shardings = [[kind.on(places) for kind in kinds] for kinds in (inputs, (*outputs, *ends))]
    jitted = jax.jit(program, in_shardings=tuple(shardings[0]), out_shardings=shardings[1])
    structs = [jax.ShapeDtypeStruct(k.shape, k.dtype, sharding=s) for k, s in zip(inputs, shardings[0], strict=True)]
    code = exported(jitted, structs, platform)
    options = tuple(overlap_options(body, mesh).items())
    return ProgramCode(name, code, tuple(inputs), (*outputs, *ends), donated, is_watched, options)


def _buffer_type(array: ArrayType, mesh: LogicalMesh) -> BufferType:
    spec = (*array.sharding.spec, *[None] * (len(array.shape) - len(array.sharding.spec)))
    dims = tuple(() if axes is None else (axes,) if isinstance(axes, str) else tuple(axes) for axes in spec)
    return BufferType(tuple(array.shape), np.dtype(array.dtype), Sharding(dims), mesh)
