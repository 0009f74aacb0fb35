"""Turns instructions of a stream into functions that execute them, in this process and on workers alike.

In:     compiled programs; for each message, the function that sends or receives it.
Out:    `act`: a function of the step's number and its live buffers.
Method: programs and copies are started, and not waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import jax

from autopar.partition.host_calls import Watch
from autopar.runtime.failure import CallbacksRaised, check_results
from autopar.streams.instructions import BufferId, Free, Instruction, Recv, Run, Send

Live: TypeAlias = dict[BufferId, Any]
"""The live buffers of a step."""
Act: TypeAlias = Callable[[int, Live], None]
"""Executes one instruction, given the step's number and its live buffers."""
SendTo: TypeAlias = Callable[[int, Sequence[jax.Array]], None]
"""Starts to send values in a step; the caller may free them when it returns."""
Receive: TypeAlias = Callable[[int], list[jax.Array]]
"""Returns the values sent in a step, arrived or still in flight."""


def end_of(at: int) -> BufferId:
    """The key among the buffers for the completion token of a program that calls the host at instruction `at`."""
    return -1 - at


def act(
    at: int,
    instruction: Instruction,
    programs: Mapping[str, jax.stages.Compiled],
    watched: Collection[str],
    sends: Mapping[int, SendTo],
    receives: Mapping[int, Receive],
) -> Act:
    """The function that executes instruction `at`; the last result of a `watched` program is its completion token."""
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
    """`call`, then wait until the programs of these completion tokens have ended, and raise what their callbacks raised."""

    def look(step: int, live: Live) -> None:
        call(step, live)
        for at in ends:
            live[at].block_until_ready()
        raised = watch.take()
        if raised:
            raise CallbacksRaised(raised)

    return look
