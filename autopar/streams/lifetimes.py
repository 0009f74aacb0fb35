"""Determines how long buffers live: results take the memory of operands of their type, and what is read last is freed.

In:     `Streams` whose programs allocate all results, without `Free`; arguments that may be overwritten.
Out:    `overwrite`: the same, with the operands that each program overwrites: sums and rows in place, new state in the memory
        of the old; `free`: the same, with `Free` after the last reader of each buffer that is no result of the step.
Method: a step that trains overwrites state in its updates alone, so that a failure before them leaves the state intact.
        Without gradients every program overwrites operands that it is the last to read, both state and results of other
        programs of its stage, so that a decoder's cache is in memory once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence

from autopar._jax import Var
from autopar.grouping import grouped
from autopar.inter_op.stage import IN_PLACE
from autopar.inter_op.stage_plan import TaskPlan
from autopar.streams.instructions import BufferId, Free, Instruction, Run, Streams, reads, writes

_MADE = ("const", "value", "loop", *IN_PLACE)
"""Kinds of buffers that hold results of programs."""


def overwrite(streams: Streams, donated: Collection[Var]) -> Streams:
    """The streams with the operands that each program overwrites."""
    return dataclasses.replace(streams, overwritten=dict(_overwritten(streams, donated)))


def _overwritten(streams: Streams, donated: Collection[Var]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Each program, with the positions of the operands whose memory a result of the same type takes."""
    trains = any(plan.task.kind in ("B", "W") for plan in streams.programs.values())
    kept = {at for at in streams.results if at is not None}
    of_user = {key for plan in streams.programs.values() for key in _passed_on(plan, donated)}
    for stream in streams.instructions.values():
        last = {at: k for k, instruction in enumerate(stream) for at in reads(instruction)}
        travel = {at for i in stream if not isinstance(i, Run) for at in (*reads(i), *writes(i))}
        runs = grouped((i.program, (k, i)) for k, i in enumerate(stream) if isinstance(i, Run))
        for program, places in runs.items():
            kind, (_, first) = streams.programs[program].task.kind, places[0]
            untaken = [streams.buffers[at].value.type for at in first.outputs]
            found = []
            for position, at in enumerate(first.inputs):
                value = streams.buffers[at].value
                is_state = value.kind == "argument" and value.key in donated
                is_made = value.kind in _MADE and value.key not in of_user
                each = [(k, run.inputs[position], run.inputs.count(run.inputs[position])) for k, run in places]
                read_last = all(last[b] == k and b not in kept and count == 1 for k, b, count in each)
                in_place = kind in ("F", "B", "W") and value.kind in IN_PLACE
                replaced = kind == "U" and is_state and read_last
                spent = not trains and (is_state or is_made) and read_last and at not in travel
                if (in_place or replaced or spent) and value.type in untaken:
                    untaken.remove(value.type)
                    found.append(position)
            yield program, tuple(found)


def _passed_on(plan: TaskPlan, donated: Collection[Var]) -> Iterator[Var]:
    """Results of a program that are arguments passed through unchanged and not donated: the user keeps their memory."""
    given = {slot.var for slot in plan.task.inputs if slot.kind == "argument" and slot.key not in donated}
    for slot in plan.task.outputs:
        if slot.var is not None and slot.var in given:
            yield slot.key


def free(streams: Streams) -> Streams:
    """The streams with a `Free` of each buffer after its last reader."""
    kept = {at for at in streams.results if at is not None}
    instructions = {mesh: tuple(_with_frees(stream, kept)) for mesh, stream in streams.instructions.items()}
    return dataclasses.replace(streams, instructions=instructions)


def _with_frees(stream: Sequence[Instruction], kept: Collection[BufferId]) -> list[Instruction]:
    last = {buffer: k for k, instruction in enumerate(stream) for buffer in (*writes(instruction), *reads(instruction))}
    ending = grouped((k, buffer) for buffer, k in last.items() if buffer not in kept)
    found: list[Instruction] = []
    for k, instruction in enumerate(stream):
        found.append(instruction)
        if k in ending:
            found.append(Free(tuple(sorted(ending[k]))))
    return found
