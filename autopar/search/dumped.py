"""Writes a planned step as text, pass by pass, for `AUTOPAR_DUMP=folder`.

In:     the `StepPlan` that was chosen.
Out:    numbered files, in the order of passes, after that of the traced program: for one program the sharded program; for a
        pipeline the rewritten program, microbatches, segments, one file per stage, streams.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from autopar._jax import JaxprEqn, make_jaxpr
from autopar.debug import dump
from autopar.inter_op.chain import Chain
from autopar.inter_op.stage_plan import StagePlan
from autopar.intra_op.sharded import Body, Region
from autopar.ir.dataflow import variables
from autopar.ir.printer import Names, equations_text, print_equation, print_jaxpr
from autopar.ir.split.microbatches.microbatch import Microbatches
from autopar.streams.assemble import PipelinePlan, StepPlan


def dump_plan(planned: StepPlan) -> None:
    """Write the result of each pass, if `AUTOPAR_DUMP` is set."""
    if isinstance(planned, PipelinePlan):
        _dump_pipeline(planned)
    else:
        dump("sharded", lambda: "\n".join(body_text(task.body) for stage in planned.stages for task in stage.tasks))


def _dump_pipeline(pipeline: PipelinePlan) -> None:
    cut = pipeline.cut
    dump("rewritten", lambda: str(cut.program))
    dump("microbatches", lambda: "\n".join(_phases(cut.split)))
    dump("segments", lambda: "\n".join(_segments(cut.chain, pipeline.borders)))
    for number, stage in enumerate(pipeline.stages):
        dump(f"stage{number}", functools.partial(_tasks, stage))
    dump("streams", lambda: "\n".join(_streams(pipeline)))


def _phases(split: Microbatches) -> Iterator[str]:
    names = Names()
    yield "before the loop"
    yield from _equations(split.before, names)
    yield f"the loop, {split.count} times: number, {len(split.invariants)} whole values, {len(split.pieces)} pieces"
    yield print_jaxpr(split.loop)
    yield "joined: " + ", ".join(str(result.placement) for result in split.results)
    yield "after the loop"
    yield from _equations(split.after, names)


def _equations(eqns: Sequence[JaxprEqn], names: Names) -> Iterator[str]:
    for var in variables(atom for eqn in eqns for atom in eqn.invars):
        names.define(var)  # values made elsewhere need names, too
    yield from equations_text(make_jaxpr([], [], eqns), names, "  ", False)


def _segments(chain: Chain, borders: tuple[int, ...]) -> Iterator[str]:
    yield f"{chain.num_segments} segments; stages begin at {', '.join(map(str, borders))}"
    for eqn, segment, number in zip(chain.loop.eqns, chain.segment, chain.passes, strict=True):
        place = "   any" if segment < 0 else f"{segment:4d} {'FB'[number % 2]}{number // 2 or ''}"
        yield f"{place}  {print_equation(eqn)}"


def _tasks(stage: StagePlan) -> str:
    lines = [f"on {stage.mesh}"]
    for task in stage.tasks:
        lines.append(f"{task.task.name}: {len(task.inputs)} operands, {len(task.outputs)} results")
        lines += filter(None, [body_text(task.body, "  ")])
    return "\n".join(lines)


def _streams(pipeline: PipelinePlan) -> Iterator[str]:
    for mesh, instructions in pipeline.streams.instructions.items():
        yield f"mesh {mesh}"
        yield from (f"  {instruction}" for instruction in instructions)


def body_text(body: Body, indent: str = "") -> str:
    """The sharded program as text, one instruction per line."""
    lines: list[str] = []
    for instruction in body.instructions:
        lines.append(f"{indent}{instruction}")
        if isinstance(instruction, Region):
            lines += [body_text(inner, indent + "    ") for inner in instruction.bodies]
    return "\n".join(lines)
