"""Represents a step on one mesh as a pipeline of one stage with one task.

In:     a flat program, its roles; its sharding on a mesh.
Out:    its `StageProgram` and `StagePlan`.
Method: the joint program of the stage is the step itself; the task's body is the lowered step.
"""

from __future__ import annotations

from autopar.inter_op.stage import Slot, StageProgram, Task
from autopar.inter_op.stage_plan import StagePlan, TaskPlan, placed
from autopar.intra_op.read_off import Sharded
from autopar.ir.program import Program
from autopar.ir.trace.state import Roles


def fused_program(program: Program, roles: Roles) -> StageProgram:
    """The whole step, microbatches included, as the program of its only stage."""
    jaxpr = program.jaxpr
    inputs = tuple(Slot("argument", var, var) for var in jaxpr.invars)
    outputs = tuple(Slot("value", atom, atom) for atom in jaxpr.outvars)
    return StageProgram(
        stage=0,
        count=1,
        jaxpr=jaxpr,
        arguments=dict(enumerate(jaxpr.invars)),
        aliases=roles.aliases,
        donated=tuple(roles.donated),
        outputs={k: k for k in range(len(jaxpr.outvars))},
        batch=roles.dims,
        tasks=(Task("step", program.name, 0, 0, jaxpr, inputs, outputs),),
    )


def fused_stage(program: StageProgram, sharded: Sharded) -> StagePlan:
    """The plan of the only stage, from the sharded step."""
    (task,), body = program.tasks, sharded.body
    inputs, outputs = (
        tuple(
            placed(slot, sharding, atom.aval.shape, atom.aval.dtype, sharded.mesh)
            for slot, (atom, sharding) in zip(slots, atoms, strict=True)
        )
        for slots, atoms in ((task.inputs, body.inputs), (task.outputs, body.outputs))
    )
    plan = TaskPlan(
        task,
        body,
        inputs,
        outputs,
        sharded.step_seconds,
        sharded.communication_seconds,
        sharded.exposed_seconds,
        0.0,
        max(0, sharded.peak_bytes - sum(v.num_bytes for v in inputs)),
        sharded.collectives,
    )
    return StagePlan(program, sharded, (plan,))
