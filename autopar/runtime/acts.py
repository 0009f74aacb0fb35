"""What a runtime does at each instruction of a stream, in this process and on a worker alike.

In:     compiled programs; for each message how it is sent, or received.
Out:    `act`: a function of the step's number and of the buffers that are there.
Method: programs and copies are begun, and not waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import jax

from autopar.partition.host_calls import Watch
from autopar.runtime.failure import CallbacksRaised, check_results
from autopar.streams.instructions import BufferId, Free, Instruction, Recv, Run, Send

Live: TypeAlias = dict[BufferId, Any]
"""The buffers of a step that exist."""
Act: TypeAlias = Callable[[int, Live], None]
"""Carries out one instruction of a step of this number on its buffers."""
SendTo: TypeAlias = Callable[[int, Sequence[jax.Array]], None]
"""Begins to send values in a step; they may be let go of after."""
Receive: TypeAlias = Callable[[int], list[jax.Array]]
"""The values that were sent in a step, there or on their way."""


def end_of(at: int) -> BufferId:
    """What tells that a program that calls the host has ended, as no buffer does: of instruction 0, 1, ... it is -1, -2, ..."""
    return -1 - at


def act(
    at: int,
    instruction: Instruction,
    programs: Mapping[str, jax.stages.Compiled],
    watched: Collection[str],
    sends: Mapping[int, SendTo],
    receives: Mapping[int, Receive],
) -> Act:
    """What is done at instruction `at`; the last result of `watched` programs tells that their callbacks have ended."""
    match instruction:
        case Run(program, _, _, inputs, outputs):
            executable = programs[program]
            made = (*outputs, end_of(at)) if program in watched else outputs

            def run(step: int, live: Live) -> None:
                results = executable(*[live[b] for b in inputs])
                check_results(results)
                live.update(zip(made, results, strict=True))

            return run
        case Send(sent, _, message):
            send = sends[message]
            return lambda step, live: send(step, [live[b] for b in sent])
        case Recv(received, _, message):
            receive = receives[message]
            return lambda step, live: live.update(zip(received, receive(step), strict=True))
        case Free(freed):

            def free(step: int, live: Live) -> None:
                for b in freed:
                    live.pop(b, None)

            return free


def then_look(call: Act, ends: Sequence[BufferId], watch: Watch) -> Act:
    """The same, after which all of these programs have ended and no callback has raised."""

    def look(step: int, live: Live) -> None:
        call(step, live)
        for at in ends:
            live[at].block_until_ready()
        raised = watch.take()
        if raised:
            raise CallbacksRaised(raised)

    return look
