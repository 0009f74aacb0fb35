"""Every program of a plan, compiled for devices that need not be there.

In:     a plan in memory, a target.
Out:    `Program`s: XLA's executable, how often it runs in a step, what the plan says of it.
Method: the programs are those that the runtime compiles, from the same functions; no array is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar.inter_op.stage_plan import TaskPlan
from autopar.intra_op.sharded import Collective, calls_host
from autopar.mesh import LogicalMesh
from autopar.partition.host_calls import Watch
from autopar.partition.task import task_function
from autopar.plan.decision import Decision
from autopar.runtime.compile import Compiler
from autopar.runtime.local import compile_program, device_mesh
from autopar.runtime.overlap import overlap_options
from autopar.search.stage_planner import stage_devices
from autopar.streams.assemble import StepPlan
from autopar.streams.instructions import Run
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
    """

    name: str
    stage: int
    mesh: LogicalMesh
    runs: int
    compiled: Any
    predicted_bytes: int
    collectives: tuple[Collective, ...]

    @property
    def memory(self) -> tuple[int, int]:
        """Bytes on one device that XLA takes: of operands, and besides them; results that take over operands count there."""
        found = self.compiled.memory_analysis()
        return found.argument_size_in_bytes, found.output_size_in_bytes + found.temp_size_in_bytes

    @property
    def peak_bytes(self) -> int:
        """What XLA takes on one device."""
        return sum(self.memory) - self.compiled.memory_analysis().alias_size_in_bytes


def compile_programs(plan: Decision, target: Target) -> list[Program]:
    """Compile every program of a plan."""
    if not plan.is_one_program:
        return _of_pipeline(plan, plan.attached.pipeline, target)
    planned = plan.attached.pipeline
    body, program, roles = planned.stages[0].sharded.body, planned.program, planned.roles
    avals = [var.aval for var in program.jaxpr.invars]
    made = compile_program(
        body, plan.mesh, target.devices, avals, roles.donated, program.name, program.in_paths, target.options
    )
    return [Program(plan.name, 0, plan.mesh, 1, made.compiled, plan.cost.peak_bytes[0], plan.cost.collectives)]


def _of_pipeline(plan: Decision, pipeline: StepPlan, target: Target) -> list[Program]:
    streams, devices = pipeline.streams, stage_devices(pipeline, target.devices)
    runs: dict[str, int] = {}
    for stream in plan.streams.values():
        for instruction in stream:
            if isinstance(instruction, Run):
                runs[instruction.program] = runs.get(instruction.program, 0) + 1
    compiler, found = Compiler(target.options), []
    for number, (stage, places) in enumerate(zip(pipeline.stages, devices, strict=True)):
        mesh: jax.sharding.Mesh = device_mesh(stage.mesh, places)
        for task in stage.tasks:
            name = task.task.name
            function = task_function(task, mesh, streams.overwritten[name], Watch())
            compiled = compiler.compile(
                function, name, mesh, calls_host(task.body), overlap_options(task.body, stage.mesh)
            )
            peak = _peak_bytes(task, function.donated)
            found.append(Program(name, number, stage.mesh, runs.get(name, 0), compiled, peak, task.collectives))
    return found


def _peak_bytes(task: TaskPlan, donated: Sequence[bool]) -> int:
    """Predicted bytes of one run by itself, as the simulator walks it: results take the memory of what is overwritten."""
    operands = [b.num_bytes for b in (*task.inputs, *task.written_rows)]
    gone = sum(size for size, is_gone in zip(operands, donated, strict=False) if is_gone)
    return sum(operands) - gone + max(gone, task.working_bytes, sum(b.num_bytes for b in task.outputs))
