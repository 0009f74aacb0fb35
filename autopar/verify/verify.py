"""Verifies a plan with the compiler: bytes of memory and of collectives, predicted and as compiled.

In:     a plan in memory, the name of a device.
Out:    `Verification`.
Method: memory is that of XLA's programs; a pipeline's streams are simulated with XLA's working memory of each run in place
        of the predicted one. `findings.py` defines what must agree.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import jax

from autopar.errors import AutoparError
from autopar.inter_op.stage_plan import TaskPlan
from autopar.mesh.find_device import find_device
from autopar.plan.decision import Decision
from autopar.runtime.compile import Compiled, compile_step
from autopar.streams.clock import simulate_streams
from autopar.streams.instructions import Run
from autopar.verify.findings import Checked, Verification
from autopar.verify.hlo import read_module
from autopar.verify.host_copies import executed_copies, planned_copies
from autopar.verify.schedule import follow_program, program_kernels
from autopar.verify.targets import Target, find_target


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
    made = compile_step(plan.attached.pipeline, found.devices, found.options)
    predicted, compiled = _peaks(plan, made.programs)
    return Verification(
        plan.name, found.name, tuple(_checked(plan, made, found)), predicted, compiled, plan.budget_bytes
    )


def _working_bytes(program: jax.stages.Compiled) -> int:
    """Bytes that XLA takes on one device besides operands and results that overwrite them."""
    found = program.memory_analysis()
    return found.output_size_in_bytes + found.temp_size_in_bytes - found.alias_size_in_bytes


def _compiled_bytes(program: jax.stages.Compiled) -> int:
    """Peak bytes of one device by XLA."""
    return program.memory_analysis().argument_size_in_bytes + _working_bytes(program)


def _peaks(plan: Decision, programs: Mapping[str, jax.stages.Compiled]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Per mesh, the predicted peak and that of the compiled programs."""
    if plan.is_one_program:
        (program,) = programs.values()
        return plan.cost.peak_bytes, (_compiled_bytes(program),)
    pipeline = plan.attached.pipeline
    working = {name: _working_bytes(program) for name, program in programs.items()}
    streams, stages = pipeline.streams, pipeline.stages
    walked = simulate_streams(
        streams, stages, pipeline.first_device, plan.attached.cluster, working_bytes=working
    ).peak_bytes
    return tuple(pipeline.simulation.peak_bytes[m] for m in sorted(walked)), tuple(walked[m] for m in sorted(walked))


def _checked(plan: Decision, made: Compiled, target: Target) -> Iterator[Checked]:
    """Each program of a plan, as planned and as compiled."""
    device, platform = plan.attached.cluster.device, target.devices[0].platform
    if math.isinf(device.memory_bytes_per_second):
        device = find_device("h100").device
    runs = Counter(i.program for stream in plan.streams.values() for i in stream if isinstance(i, Run))
    listed = zip(plan.cost.collectives, plan.cost.exposed_seconds, strict=True)  # by stages and their tasks
    for number, stage in enumerate(plan.attached.pipeline.stages):
        for task in stage.tasks:
            name = task.task.name
            program, times = made.programs[name], runs[name]
            module = read_module(_text(name, program, target))
            seen = follow_program(module, stage.mesh, device, on_tpus=platform == "tpu")
            planned, exposed = Counter[str](), 0.0
            for c, seconds in itertools.islice(listed, len(task.collectives)):
                planned[c.kind] += c.times // times * c.bytes
                exposed += seconds
            emitted = seen.bytes_of
            if platform != "cpu":  # whose memory is the host's
                planned.update(planned_copies(task.body, stage.mesh))
                emitted = {**emitted, **executed_copies(module)}
            yield Checked(
                name,
                number,
                times,
                _peak_bytes(task, made.functions[name].donated),
                _compiled_bytes(program),
                planned,
                emitted,
                tuple(seen.collectives),
                seen.compute_seconds,
                seen.exposed_seconds,
                exposed / times,
                program_kernels(seen.kernels),
            )


def _peak_bytes(task: TaskPlan, donated: Sequence[bool]) -> int:
    """Predicted peak of one run by itself, as in the simulator: results reuse the memory of donated operands."""
    operands = [b.num_bytes for b in (*task.inputs, *task.written_rows)]
    gone = sum(size for size, is_gone in zip(operands, donated, strict=False) if is_gone)
    return sum(operands) + max(task.working_bytes, sum(b.num_bytes for b in task.outputs) - gone)


def _text(name: str, program: jax.stages.Compiled, target: Target) -> str:
    """A compiled program, as XLA prints it."""
    try:
        return program.as_text()
    except jax.errors.JaxRuntimeError as error:
        raise AutoparError(
            "XLA cannot print what it compiled.",
            given=f"{name} for {target.name}",
            wrong=f"its collectives cannot be read: {str(error).splitlines()[0]}",
            do="install the compiler in the version that this JAX asks for (for TPUs: "
            f"pip install 'jax[tpu]=={jax.__version__}'), or verify for another device of the same kind.",
        ) from error
