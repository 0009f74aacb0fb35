"""A plan held against the compiler: bytes of memory and of collectives, predicted and as compiled.

In:     a plan in memory, the name of a device.
Out:    `Verification`.
Method: memory is what XLA's programs take; of a pipeline the walk of its streams, in which each run takes what XLA says
        instead of what the plan does. What must agree, `findings.py` says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import jax

from autopar.errors import AutoparError
from autopar.mesh.find_device import find_device
from autopar.plan.decision import Decision
from autopar.report.html import whole_file
from autopar.report.show import write_page
from autopar.streams.clock import simulate_streams
from autopar.verify.compile import Program, compile_programs
from autopar.verify.findings import Checked, Findings
from autopar.verify.hlo import read_module
from autopar.verify.host_copies import executed_copies
from autopar.verify.page import verification_html, verification_text
from autopar.verify.schedule import follow_program, program_kernels
from autopar.verify.targets import Target, find_target


@dataclass(frozen=True, repr=False)
class Verification(Findings):
    """A plan and what XLA makes of it: its attributes are those of `Findings`."""

    def __str__(self) -> str:
        return verification_text(self)

    def __repr__(self) -> str:
        return f"Verification({self.plan} for {self.target}: {'agrees' if self.ok else self.problems[0]})"

    def _repr_html_(self) -> str:
        return verification_html(self)

    def save_html(self, path: str | PathLike) -> Path:
        """Write the page as a file that needs nothing else."""
        return write_page(Path(path), whole_file(f"{self.plan}, compiled for {self.target}", self._repr_html_()))


def verify_plan(plan: Decision, target: str | None = None) -> Verification:
    """Compile every program of a plan, and compare.

    Args:
        plan: Made in this process, or attached to its step.
        target: A device of the catalog, which need not be there: `"h100"`, `"a100"`, `"b200"`, `"tpu-v5e"`. None: the
            devices that the plan is for.

    Raises:
        AutoparError: The compiler for the target is not installed.
        AutoparError: XLA compiles for it, and cannot print what comes of that.
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
    seen = follow_program(module, program.mesh, device)
    planned: dict[str, int] = {}
    for c in program.collectives:
        planned[c.kind] = planned.get(c.kind, 0) + c.times * c.bytes
    emitted = seen.bytes_of
    if target.devices[0].platform != "cpu":  # whose memory is the host's
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
            do="verify for another device of the same kind, or with another version of the compiler.",
        ) from error
