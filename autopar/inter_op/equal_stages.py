"""Stages that are equal but for the names of their values: sharded and lowered once.

In:     a stage's program, the plan of an equal one.
Out:    `StagePlan`.
Method: the choices are taken over. For the clock it is enough to give the other's tasks the names of this stage's values;
        what each device does is lowered when something runs or is told of it: a search throws most pipelines away.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence

from autopar._jax import Jaxpr
from autopar.inter_op.stage import StageProgram
from autopar.inter_op.stage_plan import StagePlan, TaskPlan, lower_stage, stage_graph
from autopar.inter_op.stage_tasks import Slot, Task, read_as_given
from autopar.intra_op.read_off import Sharded, read_off
from autopar.ir.canonical import canonical_key
from autopar.mesh import Device


def take_over(
    program: StageProgram, like: StagePlan, device: Device, key_of: Callable[[Jaxpr], Hashable] = canonical_key
) -> StagePlan:
    """An equal stage under the same choices, its tasks with the names of its values where these are equal too.

    `key_of` is `canonical_key`, or what remembers it.
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
    """The stage with what each device does in its own values."""
    if not stage.borrowed:
        return stage
    program, old = stage.program, stage.sharded
    graph = stage_graph(program, old.mesh, tables=old.graph.tables)
    assert len(graph.nodes) == len(old.choices), "the stages are not equal"
    # The problem is about numbers of nodes and choices, and the same for both.
    sharded: Sharded = read_off(
        graph, old.choices, old.class_of, old.problem, old.solution, old.allowed, device, program.donated
    )
    return lower_stage(program, device, sharded)


def _are_equal(task: Task, other: TaskPlan, key_of: Callable[[Jaxpr], Hashable]) -> bool:
    """Whether they do the same, with the same kinds of operands and results."""
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
