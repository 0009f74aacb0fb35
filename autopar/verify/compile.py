"""Every program of a plan, compiled for devices that need not be there.

In:     a plan in memory, a target.
Out:    `Program`s: XLA's executable, how often it runs in a step, what the plan says of it.
Method: the programs are those that the runtime compiles, from the same functions; no array is made.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.inter_op.stage_plan import TaskPlan
from autopar.intra_op.sharded import Collective
from autopar.mesh import LogicalMesh
from autopar.plan.decision import Decision
from autopar.runtime.compile import compile_step
from autopar.streams.instructions import Run
from autopar.verify.host_copies import planned_copies
from autopar.verify.targets import Target


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A program that was compiled.

    Attributes:
        name: As in the plan's streams.
        stage: On whose mesh.
        mesh: The mesh.
        runs: In one step.
        compiled: XLA's.
        predicted_bytes: At its peak on one device, operands included.
        collectives: Of one run, as planned.
        host_copies: Bytes of one run that go to the host's memory and come from there, as planned.
    """

    name: str
    stage: int
    mesh: LogicalMesh
    runs: int
    compiled: Any
    predicted_bytes: int
    collectives: tuple[Collective, ...]
    host_copies: Mapping[str, int]

    @property
    def working_bytes(self) -> int:
        """Bytes on one device that XLA takes besides operands, and what is written over them."""
        found = self.compiled.memory_analysis()
        return found.output_size_in_bytes + found.temp_size_in_bytes - found.alias_size_in_bytes

    @property
    def peak_bytes(self) -> int:
        """What XLA takes on one device."""
        return self.compiled.memory_analysis().argument_size_in_bytes + self.working_bytes


def compile_programs(plan: Decision, target: Target) -> list[Program]:
    """Compile every program of a plan."""
    planned = plan.attached.pipeline
    made = compile_step(planned, target.devices, target.options)
    runs = Counter(i.program for stream in plan.streams.values() for i in stream if isinstance(i, Run))
    told, found = iter(plan.cost.collectives), []  # those of each program, in the order of stages and their tasks
    for number, stage in enumerate(planned.stages):
        for task in stage.tasks:
            name = task.task.name
            peak = _peak_bytes(task, made.functions[name].donated)
            own = itertools.islice(told, len(task.collectives))
            once = tuple(dataclasses.replace(c, times=c.times // runs[name]) for c in own)
            copied = planned_copies(task.body, stage.mesh)
            found.append(Program(name, number, stage.mesh, runs[name], made.programs[name], peak, once, copied))
    return found


def _peak_bytes(task: TaskPlan, donated: Sequence[bool]) -> int:
    """Predicted bytes of one run by itself, as the simulator walks it: results take the memory of what is overwritten."""
    operands = [b.num_bytes for b in (*task.inputs, *task.written_rows)]
    gone = sum(size for size, is_gone in zip(operands, donated, strict=False) if is_gone)
    return sum(operands) + max(task.working_bytes, sum(b.num_bytes for b in task.outputs) - gone)
