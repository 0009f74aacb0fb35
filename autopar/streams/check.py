"""Checks instruction streams: nothing is missing, used before it is written or after it is freed, and nothing deadlocks.

In:     `Streams`.
Out:    nothing, or `StreamError` that names mesh, instruction and buffer.
Method: every message is sent once, and received once by its addressee, with the same values; a buffer is written once, by
        its mesh, before it is read, and freed after; each program gets the operands it declares, in order; each result is
        alive at the end; and the streams have a common order (`order.py`), so that none waits for ever.
"""

from __future__ import annotations

from autopar.inter_op.stage import IN_PLACE, PER_MICROBATCH
from autopar.streams.instructions import BufferId, Free, MeshId, Recv, Run, Send, Streams, reads, writes
from autopar.streams.order import StreamError, merged


def check_streams(streams: Streams, num_microbatches: int) -> None:
    """Check the instructions against the programs and buffers that they name.

    Raises `StreamError`: they are wrong; names the mesh and the instruction.
    """
    _check_messages(streams)
    _check_runs(streams, num_microbatches)
    for mesh in streams.instructions:
        _check_buffers(mesh, streams)
    merged(streams.instructions)


def _check_messages(streams: Streams) -> None:
    sent: dict[int, tuple[MeshId, Send]] = {}
    received: dict[int, tuple[MeshId, Recv]] = {}
    for mesh, stream in streams.instructions.items():
        for instruction in stream:
            match instruction:
                case Send(message=message):
                    if message in sent:
                        raise StreamError(f"mesh {mesh}: {instruction}: message {message} was sent before.")
                    sent[message] = mesh, instruction
                case Recv(message=message):
                    if message in received:
                        raise StreamError(f"mesh {mesh}: {instruction}: message {message} was received before.")
                    received[message] = mesh, instruction
    for message in sorted({*sent, *received}):
        if message not in received:
            mesh, send = sent[message]
            raise StreamError(f"mesh {mesh}: {send}: no one receives message {message}.")
        if message not in sent:
            mesh, recv = received[message]
            raise StreamError(f"mesh {mesh}: {recv}: no one sends message {message}.")
        (source, send), (target, recv) = sent[message], received[message]
        if send.peer != target or recv.peer != source:
            raise StreamError(
                f"mesh {source}: {send}: message {message} is received by mesh {target} from {recv.peer}."
            )
        names = [streams.names[b] for b in send.buffers]
        if names != [streams.names[b] for b in recv.buffers]:
            raise StreamError(f"mesh {target}: {recv}: message {message} holds other values.")


def _check_runs(streams: Streams, num_microbatches: int) -> None:
    wanted = {
        (name, k): None
        for name, plan in streams.programs.items()
        for k in range(num_microbatches if plan.task.is_in_loop else 1)
    }
    seen: dict[tuple[str, int], None] = {}
    for mesh, stream in streams.instructions.items():
        for instruction in stream:
            if isinstance(instruction, Run):
                key = instruction.program, instruction.microbatch
                if key in seen or key not in wanted:
                    raise StreamError(f"mesh {mesh}: {instruction}: runs {'twice' if key in seen else 'uncalled for'}.")
                seen[key] = None
                _check_operands(mesh, instruction, streams)
    for program, microbatch in wanted:
        if (program, microbatch) not in seen:
            raise StreamError(f"{program} never runs for microbatch {microbatch}.")


def _check_operands(mesh: MeshId, run: Run, streams: Streams) -> None:
    plan = streams.programs[run.program]
    operands = [(b.kind, b.key) for b in (*plan.inputs, *plan.written_rows)]
    if plan.needs_number:
        operands.append(streams.names[streams.numbers[0]][:2])
    made = [(b.kind, b.key) for b in plan.outputs]
    for what, values, buffers in (("reads", operands, run.inputs), ("makes", made, run.outputs)):
        if len(values) != len(buffers):
            raise StreamError(f"mesh {mesh}: {run}: {what} {len(buffers)} buffers, the program has {len(values)}.")
        for (kind, key), buffer in zip(values, buffers, strict=True):
            name = streams.names[buffer]
            right = name[0] == kind and name[1] is key
            if not right or (kind in PER_MICROBATCH and name[2] != run.microbatch):
                raise StreamError(
                    f"mesh {mesh}: {run}: {what} b{buffer}, which holds {name[0]} of microbatch {name[2]}."
                )


def _check_buffers(mesh: MeshId, streams: Streams) -> None:
    results, given = [at for at in streams.results if at is not None], streams.given[mesh]
    alive = dict.fromkeys(given)
    written = dict(alive)
    freed: dict[BufferId, None] = {}
    newest: dict[tuple[str, object], BufferId] = {}
    for instruction in streams.instructions[mesh]:
        for buffer in reads(instruction):
            if buffer in freed:
                raise StreamError(f"mesh {mesh}: {instruction}: b{buffer} was freed before.")
            if buffer not in alive:
                raise StreamError(f"mesh {mesh}: {instruction}: b{buffer} is not written yet.")
            kind, key, _ = streams.names[buffer]
            if kind in IN_PLACE and newest.get((kind, key), buffer) != buffer:
                raise StreamError(f"mesh {mesh}: {instruction}: b{buffer} was overwritten before.")
        for buffer in writes(instruction):
            if buffer in written:
                raise StreamError(f"mesh {mesh}: {instruction}: b{buffer} is written twice.")
            if streams.buffers[buffer].mesh != mesh:
                raise StreamError(
                    f"mesh {mesh}: {instruction}: b{buffer} belongs to mesh {streams.buffers[buffer].mesh}."
                )
            written[buffer] = alive[buffer] = None
            kind, key, _ = streams.names[buffer]
            if kind in IN_PLACE:
                newest[kind, key] = buffer
        if isinstance(instruction, Free):
            for buffer in instruction.buffers:
                if buffer not in alive:
                    raise StreamError(f"mesh {mesh}: {instruction}: b{buffer} is freed and not live.")
                del alive[buffer]
                freed[buffer] = None
    leaked = [b for b in alive if b not in results and b not in given]
    if leaked:
        raise StreamError(f"mesh {mesh}: b{leaked[0]} is never freed.")
    missing = [b for b in results if streams.buffers[b].mesh == mesh and b not in alive]
    if missing:
        raise StreamError(f"b{missing[0]}, a result of the step, is not on mesh {mesh} at the end.")
