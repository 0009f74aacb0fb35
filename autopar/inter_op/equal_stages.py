"""Reuses a stage's plan for stages that are equal up to the names of their values.

In:     a stage's program, the plan of an equal stage.
Out:    `StagePlan`.
Method: the sharding choices are reused. For the simulator it is enough to rename the values of the other stage's tasks;
        the device bodies are lowered only when the plan is run or shown, since a search discards most pipelines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence

from autopar._jax import Jaxpr
from autopar.inter_op.stage import StageProgram
from autopar.inter_op.stage_plan import StagePlan, TaskPlan, lower_stage, stage_graph
from autopar.inter_op.stage_tasks import Slot, Task, read_as_given
from autopar.intra_op.lower import lower
from autopar.intra_op.read_off import Sharded, read_off
from autopar.ir.signature import canonical_key
from autopar.mesh import Device


def take_over(
    program: StageProgram, like: StagePlan, device: Device, key_of: Callable[[Jaxpr], Hashable] = canonical_key
) -> StagePlan:
    """Plan `program` with the choices of the equal stage `like`; its tasks are renamed if they are equal, else lowered.

    `key_of`: `canonical_key`, or a cached version of it.
    """
    if like.program is program:
        return like
    taken = dataclasses.replace(like, program=program, borrowed=True)
    tasks = read_as_given(program.tasks, like.unchanged)
    if len(tasks) == len(like.tasks) and all(
        _are_equal(task, other, key_of) for task, other in zip(tasks, like.tasks, strict=True)
    ):
        return dataclasses.replace(taken, tasks=tuple(map(_renamed, tasks, like.tasks)))
    return lowered(taken, device)


def lowered(stage: StagePlan, device: Device) -> StagePlan:
    """Lower a borrowed stage plan, so that its bodies use the stage's own variables."""
    if not stage.borrowed:
        return stage
    program, old = stage.program, stage.sharded
    graph = stage_graph(program, old.mesh, tables=old.graph.tables)
    assert len(graph.nodes) == len(old.choices), "the stages are not equal"
    # The problem refers to nodes and choices by number, so it is the same for both.
    how = old.problem, old.solution, old.allowed, device, program.donated
    sharded: Sharded = read_off(graph, old.choices, old.class_of, *how, lower(graph, old.choices, old.body.bucket))
    return lower_stage(program, device, sharded)


def _are_equal(task: Task, other: TaskPlan, key_of: Callable[[Jaxpr], Hashable]) -> bool:
    """Whether both compute the same, with operands and results of the same kinds."""
    kinds = [(s.kind, s.placement) for s in (*task.inputs, *task.outputs)]
    return (
        task.kind == other.task.kind
        and kinds == [(s.kind, s.placement) for s in (*other.task.inputs, *other.task.outputs)]
        and key_of(task.jaxpr) == key_of(other.task.jaxpr)
    )


def _renamed(task: Task, other: TaskPlan) -> TaskPlan:
    def of_task(slots: Sequence[Slot], like: Sequence) -> tuple:
        return tuple(dataclasses.replace(b, key=slot.key, var=slot.var) for slot, b in zip(slots, like, strict=True))

    return dataclasses.replace(
        other, task=task, inputs=of_task(task.inputs, other.inputs), outputs=of_task(task.outputs, other.outputs)
    )
