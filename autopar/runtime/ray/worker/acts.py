"""What a worker does at an instruction, as a function; and its programs, compiled.

In:     code of programs, instructions of a stream; where the worker's arrays are, how messages are sent and received.
Out:    executables; for each instruction a function of the step's number and of what is held.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, assert_never

import jax

from autopar.partition.overlap import compile_lowered
from autopar.partition.shipped import with_callbacks
from autopar.partition.task import DeviceProgram
from autopar.runtime.ray.transport.transport import Receive
from autopar.runtime.ray.transport.transport import Send as SendTo
from autopar.runtime.ray.worker.places import Places
from autopar.streams.instructions import BufferId, Free, Instruction, Recv, Run, Send

Held = dict[BufferId, Any]
"""The buffers of a step that exist; of a program with callbacks that is instruction k, at -1-k, what tells its end."""


def compiled(
    program: DeviceProgram[bytes], places: Places, callbacks: Sequence[Callable[..., Any]] | None = None
) -> jax.stages.Compiled:
    """A program for the devices of a worker, with the host's functions that it calls."""
    call = jax.export.deserialize(bytearray(program.code)).call
    if callbacks:
        call = with_callbacks(call, callbacks)

    def function(*arrays: jax.Array) -> Any:
        return call(*arrays)

    function.__name__ = function.__qualname__ = program.title
    shardings = tuple(places.sharding(kind) for kind in program.inputs)
    jitted = jax.jit(
        function,
        in_shardings=shardings,
        out_shardings=[places.sharding(kind) for kind in program.outputs],
        donate_argnums=tuple(k for k, donated in enumerate(program.donated) if donated),
    )
    structs = [
        jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding)
        for kind, sharding in zip(program.inputs, shardings, strict=True)
    ]
    return compile_lowered(jitted.lower(*structs), dict(program.options), jax.default_backend())


def act(
    at: int,
    instruction: Instruction,
    programs: Mapping[str, jax.stages.Compiled],
    watched: Collection[str],
    sends: Mapping[int, SendTo],
    receives: Mapping[int, Receive],
) -> Callable[[int, Held], None]:
    """What instruction `at` of a stream does; the last result of `watched` programs tells that their callbacks have ended."""
    match instruction:
        case Run(program, _, _, inputs, outputs):
            executable = programs[program]
            # That a program with callbacks has ended, no buffer tells: of instruction 0, 1, ... it stands at -1, -2, ...
            made = (*outputs, -1 - at) if program in watched else outputs

            def run(step: int, held: Held) -> None:
                held.update(zip(made, executable(*[held[b] for b in inputs]), strict=True))

            return run
        case Send(sent, _, message):
            send = sends[message]
            return lambda step, held: send(step, [held[b] for b in sent])
        case Recv(received, _, message):
            receive = receives[message]
            return lambda step, held: held.update(zip(received, receive(step), strict=True))
        case Free(freed):

            def free(step: int, held: Held) -> None:
                for b in freed:
                    held.pop(b, None)

            return free
        case _:
            assert_never(instruction)
