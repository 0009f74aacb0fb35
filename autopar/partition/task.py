"""Makes a task one JAX program over global arrays.

In:     `TaskPlan`, the mesh.
Out:    `DeviceProgram`: a function of global arrays, and the types of its operands and results.
Method: a partial sum of scalars enters and leaves as a vector (`mesh/sharding.py`). Pieces are sliced locally from the
        stack of all microbatches, and rows written locally into theirs. A program that calls the host has an additional
        scalar result, which tells that it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from autopar.inter_op.stage_plan import TaskPlan
from autopar.intra_op.sharded import Body, calls_host
from autopar.ir.split.microbatches.accumulate import first_value
from autopar.mesh import ArrayType, LogicalMesh, Sharding
from autopar.partition.host_calls import Bind, Watch, bind_here, watched
from autopar.partition.overlap import overlap_options
from autopar.partition.program import run_body

Code = TypeVar("Code")
Function: TypeAlias = Callable[..., list[jax.Array]]
Places: TypeAlias = jax.sharding.Mesh | AbstractMesh
"""A mesh of devices; or an abstract one, to compile for devices of another process."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceProgram(Generic[Code]):
    """A program of global arrays.

    Attributes:
        name: Name in the streams.
        code: A `Function`, or the bytes that `jax.export` made of one.
        inputs: Types of the operands: the task's, then stacks that rows are written into, then the microbatch index.
        outputs: Types of the results.
        donated: Per operand, whether a result reuses its memory.
        calls_host: Whether it has callbacks that may raise; its last result, kept in no buffer, then tells that it ended.
        options: XLA's options on GPUs.
    """

    name: str
    code: Code
    inputs: tuple[ArrayType, ...]
    outputs: tuple[ArrayType, ...]
    donated: tuple[bool, ...]
    calls_host: bool = False
    options: tuple[tuple[str, bool | int], ...] = ()

    @property
    def title(self) -> str:
        """Its name in profilers."""
        return self.name.replace("/", "_")


def device_program(
    plan: TaskPlan,
    mesh: LogicalMesh,
    places: Places,
    overwritten: Collection[int],
    watch: Watch | None = None,
    platform: str | None = None,
    bind: Bind = bind_here,
) -> DeviceProgram[Function]:
    """Make a task a function of global arrays.

    Args:
        plan: The task on its mesh.
        mesh: The mesh.
        places: Its devices.
        overwritten: Positions of the operands whose memory results reuse.
        watch: Collects exceptions of callbacks; None: they are raised.
        platform: Platform of the devices; None: that of `places`.
        bind: As in `watched`.
    """
    inputs = [value.type.array for value in (*plan.inputs, *plan.written_rows)]
    outputs = [value.type.array for value in plan.outputs]
    if plan.needs_number:
        inputs.append(ArrayType((), np.dtype(np.int32), Sharding(()), mesh))
    runs_on = platform or places.devices.flat[0].platform

    def body(number: jax.Array | None) -> Body:
        return plan.body if watch is None else watched(plan.body, watch, plan.task.name, number, bind)

    sharded = jax.shard_map(
        lambda *arrays: _on_device(plan, mesh, body, runs_on, arrays),
        mesh=places,
        in_specs=tuple(kind.sharding.partition_spec() for kind in inputs),
        out_specs=[kind.sharding.partition_spec() for kind in outputs],
        check_vma=False,
    )
    ends = [ArrayType((), np.dtype(np.int8), Sharding(()), mesh)] if calls_host(plan.body) else []

    def program(*arrays: jax.Array) -> list[jax.Array]:
        return [*sharded(*arrays), *(jnp.int8(0) for _ in ends)]

    donated = tuple(k in overwritten for k in range(len(inputs)))
    options = tuple(overlap_options(plan.body, mesh).items())
    return DeviceProgram(plan.task.name, program, tuple(inputs), (*outputs, *ends), donated, bool(ends), options)


def _on_device(
    plan: TaskPlan,
    mesh: LogicalMesh,
    body: Callable[[jax.Array | None], Body],
    platform: str,
    arrays: Sequence[jax.Array],
) -> list[jax.Array]:
    """Run a task on one device, from its shards of the operands to its shards of the results.

    `body`: the task's body, given the index of the microbatch, or None if the task has none.
    """
    number_at = next((k for k, value in enumerate(plan.inputs) if value.kind == "number"), None)
    number = arrays[-1] if plan.needs_number else arrays[number_at] if number_at is not None else None
    operands = []
    for value, array in zip(plan.inputs, arrays, strict=False):
        is_piece = value.kind == "piece"
        if not array.size:  # XLA crashes where one enters a manual computation and is read (jaxlib 0.11.2, on CPUs)
            array = jnp.zeros(array.shape[value.type.is_vector + is_piece :], array.dtype)
        else:
            array = array[0] if value.type.is_vector else array
            array = lax.dynamic_index_in_dim(array, number, 0, keepdims=False) if is_piece else array
        operands.append(array)
    made = run_body(body(number), operands, mesh.axis_sizes, platform)
    stacks, results = iter(arrays[len(plan.inputs) :]), list[jax.Array]()
    for value, array in zip(plan.outputs, made, strict=False):
        if value.kind == "rows":
            stack, rows = next(stacks), array.astype(value.type.dtype)
            array = lax.dynamic_update_index_in_dim(stack, rows, number, 0) if rows.size else jnp.zeros_like(stack)
        results.append(array[None] if value.type.is_vector else array)
    for value in plan.outputs[len(made) :]:
        assert value.placement is not None, "only sums and rows begin empty"
        begun = value.type.array
        shape = begun.sharding.local_shape(begun.shape, mesh)
        results.append(first_value(jax.ShapeDtypeStruct(shape, begun.dtype), value.placement))
    return results


def abstract_mesh(mesh: LogicalMesh) -> AbstractMesh:
    """The mesh as a JAX mesh without devices."""
    return AbstractMesh(mesh.shape, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.shape))


def jitted(
    program: DeviceProgram[Function],
    on: Callable[[ArrayType], NamedSharding],
    *,
    donates: bool = True,
    keep_unused: bool = False,
) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
    """The program under `jax.jit`, with the shardings of its operands and results; and abstract operands, for lowering.

    `on`: the sharding of arrays of a type, over the devices.
    """

    def step(*arrays: jax.Array) -> list[jax.Array]:
        return program.code(*arrays)

    step.__name__ = step.__qualname__ = program.title
    function = jax.jit(
        step,
        in_shardings=tuple(map(on, program.inputs)),
        out_shardings=[on(kind) for kind in program.outputs],
        donate_argnums=tuple(k for k, donated in enumerate(program.donated) if donated and donates),
        keep_unused=keep_unused,
    )
    return function, [jax.ShapeDtypeStruct(kind.array.shape, kind.dtype, sharding=on(kind)) for kind in program.inputs]
