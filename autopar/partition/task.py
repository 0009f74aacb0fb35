"""A task as one JAX program per mesh: what enters and leaves it laid out for arrays that outlive a program.

In:     `TaskPlan`, the devices' mesh.
Out:    a function of global arrays, and the type and sharding of each of its operands and results.
Method: a partial sum has no global array of its own; between programs it is one with a leading dim, one row per device
        that holds a part. A piece is cut from the stack of all microbatches, and rows are written into theirs, locally:
        the dim of microbatches is never split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from autopar._jax import Literal
from autopar.inter_op.stage_plan import Border, TaskPlan
from autopar.ir.accumulate import accumulator_type, first_value
from autopar.ir.pieces import Share
from autopar.mesh import Sharding
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


def array_type(border: Border, count: int, shape: tuple[int, ...], dtype: Any, places: jax.sharding.Mesh) -> ArrayType:
    """The array that holds a value between programs.

    Args:
        border: The value.
        count: Number of microbatches.
        shape: Global shape, of one microbatch for pieces and rows.
        dtype: Element type.
        places: The devices.
    """
    stacked = border.slot.kind in ("piece", "rows")
    rows = 1
    for axis in border.sharding.partial:
        rows *= places.shape[axis]
    full = ((rows,) if border.sharding.partial else ()) + ((count,) if stacked else ()) + shape
    return ArrayType(full, dtype, NamedSharding(places, partition_spec(border.sharding, int(stacked))))


def task_function(
    plan: TaskPlan, count: int, shares: dict[Any, Share], places: jax.sharding.Mesh, donated: Sequence[bool] = ()
) -> TaskFunction:
    """Make a task a function of global arrays.

    Args:
        plan: The task on its mesh.
        count: Number of microbatches.
        shares: How each result of the loop is joined.
        places: The devices.
        donated: For each operand, whether it may be overwritten; sums and rows always are.
    """
    task = plan.task
    rows = plan.written_rows

    def type_of(border: Border) -> ArrayType:
        slot = border.slot
        aval = slot.key.aval
        if slot.kind == "sum":
            aval = accumulator_type(slot.key.aval, shares[slot.key])
        shape = tuple(aval.shape)
        if slot.kind == "rows":
            dim = shares[slot.key].dim  # type: ignore[union-attr]
            shape = tuple(n // count if d == dim else n for d, n in enumerate(shape))
        return array_type(border, count, shape, aval.dtype, places)

    inputs = [type_of(b) for b in (*plan.inputs, *rows)]
    outputs = [type_of(b) for b in plan.outputs]
    axis_sizes = dict(places.shape)
    program = per_device_program(plan.body, axis_sizes, places.devices.flat[0].platform == "cpu")
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
        made = program(*operands)
        stacks = iter(arrays[len(plan.inputs) :])
        results = []
        for border, array in zip(plan.outputs[:num_body], made, strict=True):
            if border.slot.kind == "rows":
                array = lax.dynamic_update_index_in_dim(
                    next(stacks), array.astype(border.slot.key.aval.dtype), number, 0
                )
            results.append(array[None] if border.sharding.partial else array)
        for border, begun in zip(plan.outputs[num_body:], outputs[num_body:], strict=True):
            share = shares[border.slot.key]
            shape = begun.sharding.shard_shape(begun.shape)
            results.append(first_value(jax.ShapeDtypeStruct(shape, begun.dtype), share))
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
    in_place = {b.slot.key for b in plan.outputs if b.slot.kind == "sum"} if task.kind in ("F", "B", "W") else set()
    over = [
        (b.slot.kind == "sum" and b.slot.key in in_place) or bool(donated and donated[k])
        for k, b in enumerate(plan.inputs)
    ]
    over += [True] * len(rows) + [False] * needs_number
    return TaskFunction(function, tuple(inputs), tuple(outputs), tuple(over))


def is_constant(atom: Any) -> bool:
    """Whether a result of the step is a number known beforehand."""
    return isinstance(atom, Literal)
