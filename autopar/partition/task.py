"""A task as one JAX program per mesh: what enters and leaves it laid out for arrays that outlive a program.

In:     `TaskPlan`, the devices' mesh.
Out:    a function of global arrays, and the type and sharding of each of its operands and results.
Method: a partial sum has no global array of its own; between programs it is one with a leading dim, one row per device
        that holds a part. A piece is cut from the stack of all microbatches, and rows are written into theirs, locally:
        the dim of microbatches is never split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from autopar.inter_op.stage_plan import Border, TaskPlan
from autopar.ir.split.accumulate import first_value
from autopar.mesh import Sharding
from autopar.partition.host_calls import Bind, Watch, bind_here, watched
from autopar.partition.program import per_device_program


@dataclass(frozen=True, slots=True, eq=False)
class ArrayType:
    """A global array between programs."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: NamedSharding

    def struct(self) -> jax.ShapeDtypeStruct:
        """As JAX wants it for lowering."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)


@dataclass(frozen=True, slots=True, eq=False)
class TaskFunction:
    """A task to be compiled.

    Attributes:
        function: Of global arrays: `inputs`, in order.
        inputs: Types of the operands; stacks that rows are written into come last.
        outputs: Types of the results.
        donated: For each operand, whether its memory is taken over by a result.
    """

    function: Callable[..., list[jax.Array]]
    inputs: tuple[ArrayType, ...]
    outputs: tuple[ArrayType, ...]
    donated: tuple[bool, ...]


def partition_spec(sharding: Sharding, leading: int = 0) -> PartitionSpec:
    """As arrays between programs have it: first the dim of partial sums, then `leading` whole dims."""
    partial = [sharding.partial] if sharding.partial else []
    return PartitionSpec(*partial, *[None] * leading, *sharding.partition_spec())


def array_type(border: Border, places: jax.sharding.Mesh | AbstractMesh) -> ArrayType:
    """The array that holds a value between programs on these devices."""
    leading = len(border.shape) - len(border.sharding.dims)
    rows = tuple(math.prod(places.shape[axis] for axis in border.sharding.partial) for _ in border.sharding.partial[:1])
    spec = partition_spec(border.sharding, leading)
    return ArrayType((*rows, *border.shape), border.dtype, NamedSharding(places, spec))


def task_function(
    plan: TaskPlan,
    places: jax.sharding.Mesh | AbstractMesh,
    overwritten: Collection[int],
    watch: Watch | None = None,
    platform: str | None = None,
    bind: Bind = bind_here,
) -> TaskFunction:
    """Make a task a function of global arrays.

    Args:
        plan: The task on its mesh.
        places: The devices; or only their mesh, to compile for devices of another process.
        overwritten: Positions of the operands whose memory results take.
        watch: Where callbacks leave what they raise; None: they raise it.
        platform: Of the devices; None: `places` has them.
        bind: As of `watched`.
    """
    rows = plan.written_rows
    inputs = [array_type(b, places) for b in (*plan.inputs, *rows)]
    outputs = [array_type(b, places) for b in plan.outputs]
    axis_sizes = dict(places.shape)
    in_order = (platform or places.devices.flat[0].platform) == "cpu"
    number_at = next((k for k, b in enumerate(plan.inputs) if b.slot.kind == "number"), None)
    needs_number = plan.needs_number
    num_body = len(plan.body.outputs)

    def local(*arrays: jax.Array) -> list[jax.Array]:
        number = arrays[-1] if needs_number else arrays[number_at] if number_at is not None else None
        operands = []
        for border, array in zip(plan.inputs, arrays, strict=False):
            array = array[0] if border.sharding.partial else array
            if border.slot.kind == "piece":
                array = lax.dynamic_index_in_dim(array, number, 0, keepdims=False)
            operands.append(array)
        body = plan.body if watch is None else watched(plan.body, watch, plan.task.name, number, bind)
        made = per_device_program(body, axis_sizes, in_order)(*operands)
        stacks = iter(arrays[len(plan.inputs) :])
        results = []
        for border, array in zip(plan.outputs[:num_body], made, strict=True):
            if border.slot.kind == "rows":
                array = lax.dynamic_update_index_in_dim(next(stacks), array.astype(border.dtype), number, 0)
            results.append(array[None] if border.sharding.partial else array)
        for border, begun in zip(plan.outputs[num_body:], outputs[num_body:], strict=True):
            assert border.slot.placement is not None, "only sums and rows begin empty"
            shape = begun.sharding.shard_shape(begun.shape)
            results.append(first_value(jax.ShapeDtypeStruct(shape, begun.dtype), border.slot.placement))
        return results

    if needs_number:
        inputs.append(ArrayType((), jnp.dtype(jnp.int32), NamedSharding(places, PartitionSpec())))
    function = jax.shard_map(
        local,
        mesh=places,
        in_specs=tuple(t.sharding.spec for t in inputs),
        out_specs=[t.sharding.spec for t in outputs],
        check_vma=False,
    )
    donated = tuple(k in overwritten for k in range(len(inputs)))
    return TaskFunction(function, tuple(inputs), tuple(outputs), donated)
