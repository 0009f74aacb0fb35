"""Verifies a plan with the compiler: bytes of memory and of collectives, predicted and as compiled.

In:     a plan in memory, the name of a device.
Out:    `Verification`.
Method: memory is that of XLA's programs; a pipeline's streams are simulated with XLA's working memory of each run in place
        of the predicted one. `findings.py` defines what must agree.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar.errors import AutoparError
from autopar.inter_op.stage_plan import TaskPlan
from autopar.intra_op.sharded import Collective
from autopar.mesh import LogicalMesh
from autopar.mesh.find_device import find_device
from autopar.plan.decision import Decision
from autopar.runtime.compile import compile_step
from autopar.streams.clock import simulate_streams
from autopar.streams.instructions import Run
from autopar.verify.findings import Checked, Verification
from autopar.verify.hlo import read_module
from autopar.verify.host_copies import executed_copies, planned_copies
from autopar.verify.schedule import follow_program, program_kernels
from autopar.verify.targets import Target, find_target


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A compiled program.

    Attributes:
        name: Name in the plan's streams.
        stage: The stage whose mesh it runs on.
        mesh: The mesh.
        runs: Runs per step.
        compiled: XLA's executable.
        predicted_bytes: Predicted peak of one device, operands included.
        collectives: Planned collectives of one run.
        exposed_seconds: Predicted seconds in one run in which kernels wait for them.
        host_copies: Planned bytes copied to and from host memory in one run.
    """

    name: str
    stage: int
    mesh: LogicalMesh
    runs: int
    compiled: Any
    predicted_bytes: int
    collectives: tuple[Collective, ...]
    exposed_seconds: float
    host_copies: Mapping[str, int]

    @property
    def working_bytes(self) -> int:
        """Bytes that XLA takes on one device besides operands and results that overwrite them."""
        found = self.compiled.memory_analysis()
        return found.output_size_in_bytes + found.temp_size_in_bytes - found.alias_size_in_bytes

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of one device by XLA."""
        return self.compiled.memory_analysis().argument_size_in_bytes + self.working_bytes


def compile_programs(plan: Decision, target: Target) -> list[Program]:
    """Compile every program of a plan."""
    planned = plan.attached.pipeline
    made = compile_step(planned, target.devices, target.options)
    runs = Counter(i.program for stream in plan.streams.values() for i in stream if isinstance(i, Run))
    listed = zip(
        plan.cost.collectives, plan.cost.exposed_seconds, strict=True
    )  # in the order of stages and their tasks
    found = []
    for number, stage in enumerate(planned.stages):
        for task in stage.tasks:
            name = task.task.name
            peak = _peak_bytes(task, made.functions[name].donated)
            own = list(itertools.islice(listed, len(task.collectives)))
            once = tuple(dataclasses.replace(c, times=c.times // runs[name]) for c, _ in own)
            exposed = sum(seconds for _, seconds in own) / runs[name]
            copied = planned_copies(task.body, stage.mesh)
            found.append(
                Program(name, number, stage.mesh, runs[name], made.programs[name], peak, once, exposed, copied)
            )
    return found


def _peak_bytes(task: TaskPlan, donated: Sequence[bool]) -> int:
    """Predicted peak of one run by itself, as in the simulator: results reuse the memory of donated operands."""
    operands = [b.num_bytes for b in (*task.inputs, *task.written_rows)]
    gone = sum(size for size, is_gone in zip(operands, donated, strict=False) if is_gone)
    return sum(operands) + max(task.working_bytes, sum(b.num_bytes for b in task.outputs) - gone)


def verify_plan(plan: Decision, target: str | None = None) -> Verification:
    """Compile every program of a plan, and compare.

    Args:
        plan: A plan made in this process, or attached to its step.
        target: A device of the catalog, which need not be present: `"h100"`, `"a100"`, `"b200"`, `"tpu-v5e"`. None: the
            devices that the plan is for.

    Raises:
        AutoparError: The compiler for the target is not installed, or cannot print the compiled program.
        ClusterError: There is no description of such a device.
    """
    found = find_target(target, plan.attached.cluster)
    programs = compile_programs(plan, found)
    predicted, compiled = _peaks(plan, programs)
    checked = tuple(_checked(program, plan, found) for program in programs)
    return Verification(plan.name, found.name, checked, predicted, compiled, plan.budget_bytes)


def _peaks(plan: Decision, programs: list[Program]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Per mesh, the predicted peak and that of the compiled programs."""
    if plan.is_one_program:
        return plan.cost.peak_bytes, (programs[0].peak_bytes,)
    pipeline = plan.attached.pipeline
    working = {program.name: program.working_bytes for program in programs}
    streams, stages = pipeline.streams, pipeline.stages
    walked = simulate_streams(
        streams, stages, pipeline.first_device, plan.attached.cluster, working_bytes=working
    ).peak_bytes
    return tuple(pipeline.simulation.peak_bytes[m] for m in sorted(walked)), tuple(walked[m] for m in sorted(walked))


def _checked(program: Program, plan: Decision, target: Target) -> Checked:
    device = plan.attached.cluster.device
    if math.isinf(device.memory_bytes_per_second):
        device = find_device("h100").device
    module = read_module(_text(program, target))
    platform = target.devices[0].platform
    seen = follow_program(module, program.mesh, device, on_tpus=platform == "tpu")
    planned: dict[str, int] = {}
    for c in program.collectives:
        planned[c.kind] = planned.get(c.kind, 0) + c.times * c.bytes
    emitted = seen.bytes_of
    if platform != "cpu":  # whose memory is the host's
        planned, emitted = {**planned, **program.host_copies}, {**emitted, **executed_copies(module)}
    return Checked(
        program.name,
        program.stage,
        program.runs,
        program.predicted_bytes,
        program.peak_bytes,
        planned,
        emitted,
        tuple(seen.collectives),
        seen.compute_seconds,
        seen.exposed_seconds,
        program.exposed_seconds,
        program_kernels(seen.kernels),
    )


def _text(program: Program, target: Target) -> str:
    """The compiled program, as XLA prints it."""
    try:
        return program.compiled.as_text()
    except jax.errors.JaxRuntimeError as error:
        raise AutoparError(
            "XLA cannot print what it compiled.",
            given=f"{program.name} for {target.name}",
            wrong=f"its collectives cannot be read: {str(error).splitlines()[0]}",
            do="install the compiler in the version that this JAX asks for (for TPUs: "
            f"pip install 'jax[tpu]=={jax.__version__}'), or verify for another device of the same kind.",
        ) from error
