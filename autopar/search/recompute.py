"""Measures what the backward pass of a stage recomputes, for the plan.

In:     a pipeline.
Out:    `Recomputed`: numbers of operations, seconds and bytes.
Method: the stage is compared with itself, sharded alike, at the recomputation level `CHEAP`.
"""

from __future__ import annotations

from autopar.inter_op.residuals import CHEAP
from autopar.inter_op.stage_plan import StagePlan, lower_stage
from autopar.inter_op.stage_program import with_tasks
from autopar.inter_op.tasks import Tasks
from autopar.mesh import Device
from autopar.plan.decision import Recomputed
from autopar.streams.assemble import PipelinePlan


def recomputed_by(pipeline: PipelinePlan, stage: int, device: Device) -> Recomputed:
    """The recomputation of one stage of a pipeline."""
    tasks, planned = pipeline.tasks, pipeline.stages[stage]
    kept, level = kept_bytes(tasks, planned), tasks.levels[stage]
    if level == CHEAP:
        return Recomputed(kept_bytes=kept)
    cheap = tasks.at_level(stage, CHEAP)
    other = lower_stage(with_tasks(planned.program, cheap), device, planned.sharded)
    return Recomputed(
        level,
        sum(len(each.heavy) for each in tasks.kept(stage)),
        float(max(0.0, _backward_seconds(planned) - _backward_seconds(other))) * planned.program.count,
        kept,
        max(0, kept_bytes(cheap, other) - kept),
    )


def kept_bytes(tasks: Tasks, stage: StagePlan) -> int:
    """Bytes on one device of a microbatch's residuals in a stage."""
    values = {var for each in tasks.kept(stage.program.stage) for var in each.values}
    read = [value for task in stage.tasks if task.task.kind in ("B", "W") for value in task.inputs]
    return sum({value.key: value.num_bytes for value in read if value.key in values}.values())


def _backward_seconds(stage: StagePlan) -> float:
    return sum(task.seconds for task in stage.tasks if task.task.kind in ("B", "W"))
