"""The checker: proves of instruction streams that nothing is missing, nothing is used too early or too late, and nothing
waits for ever.

In:     streams, and what the step begins and ends with.
Out:    nothing, or `StreamError` that names mesh, instruction and buffer.
Method: every message is sent once and received once by its addressee, with as many buffers; a buffer is written once,
        by its mesh, before it is read and not after it was let go of; the right program gets the right buffers in the
        right order; each result is there at the end; and there is an order of all (`order.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.inter_op.stage import IN_PLACE, PER_MICROBATCH
from autopar.streams.instructions import BufferId, Free, Instruction, MeshId, Recv, Run, Send, reads, writes
from autopar.streams.order import StreamError, merged


@dataclass(frozen=True, slots=True, eq=False)
class Contract:
    """What the streams are held to.

    Attributes:
        given: Per mesh, buffers that are there when the step begins.
        results: Buffers that must be there at the end.
        operands: Per program, the values (kind, key) of its operands.
        made: Per program, those of its results.
        names: For each buffer its value: (kind, key, microbatch).
        mesh_of: For each buffer its mesh.
        runs: Every (program, microbatch) that must run, each once.
        num_bytes: Of each buffer on one device; (): not told.
    """

    given: Mapping[MeshId, Sequence[BufferId]]
    results: Sequence[BufferId]
    operands: Mapping[str, Sequence[tuple[str, object]]]
    made: Mapping[str, Sequence[tuple[str, object]]]
    names: Sequence[tuple[str, object, int]]
    mesh_of: Sequence[MeshId]
    runs: Sequence[tuple[str, int]]
    num_bytes: Sequence[int] = ()


def check_streams(streams: Mapping[MeshId, Sequence[Instruction]], contract: Contract) -> dict[MeshId, int]:
    """Check streams against their contract.

    Returns:
        Per mesh, the most bytes of buffers that are there at once, of messages from when they are received.

    Raises:
        StreamError: They would go wrong; names the mesh and the instruction.
    """
    _check_messages(streams, contract)
    _check_runs(streams, contract)
    peaks = {mesh: _check_buffers(mesh, stream, contract) for mesh, stream in streams.items()}
    merged(streams)
    return peaks


def _check_messages(streams: Mapping[MeshId, Sequence[Instruction]], contract: Contract) -> None:
    sent: dict[int, tuple[MeshId, Send]] = {}
    received: dict[int, tuple[MeshId, Recv]] = {}
    for mesh, stream in streams.items():
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
        names = [contract.names[b] for b in send.buffers]
        if names != [contract.names[b] for b in recv.buffers]:
            raise StreamError(f"mesh {target}: {recv}: message {message} holds other values.")


def _check_runs(streams: Mapping[MeshId, Sequence[Instruction]], contract: Contract) -> None:
    wanted = dict.fromkeys(contract.runs)
    seen: dict[tuple[str, int], None] = {}
    for mesh, stream in streams.items():
        for instruction in stream:
            if isinstance(instruction, Run):
                key = instruction.program, instruction.microbatch
                if key in seen or key not in wanted:
                    raise StreamError(f"mesh {mesh}: {instruction}: runs {'twice' if key in seen else 'uncalled for'}.")
                seen[key] = None
                _check_operands(mesh, instruction, contract)
    for program, microbatch in wanted:
        if (program, microbatch) not in seen:
            raise StreamError(f"{program} never runs for microbatch {microbatch}.")


def _check_operands(mesh: MeshId, run: Run, contract: Contract) -> None:
    for what, values, buffers in (
        ("reads", contract.operands[run.program], run.inputs),
        ("makes", contract.made[run.program], run.outputs),
    ):
        if len(values) != len(buffers):
            raise StreamError(f"mesh {mesh}: {run}: {what} {len(buffers)} buffers, the program has {len(values)}.")
        for (kind, key), buffer in zip(values, buffers, strict=True):
            name = contract.names[buffer]
            right = name[0] == kind and name[1] is key
            if not right or (kind in PER_MICROBATCH and name[2] != run.microbatch):
                raise StreamError(
                    f"mesh {mesh}: {run}: {what} b{buffer}, which holds {name[0]} of microbatch {name[2]}."
                )


def _check_buffers(mesh: MeshId, stream: Sequence[Instruction], contract: Contract) -> int:
    num_bytes = contract.num_bytes or [0] * len(contract.names)
    there = dict.fromkeys(contract.given.get(mesh, ()))
    written = dict(there)
    gone: dict[BufferId, None] = {}
    newest: dict[tuple[str, object], BufferId] = {}
    now = peak = sum(num_bytes[b] for b in there)
    for instruction in stream:
        for buffer in reads(instruction):
            if buffer in gone:
                raise StreamError(f"mesh {mesh}: {instruction}: b{buffer} was let go of before.")
            if buffer not in there:
                raise StreamError(f"mesh {mesh}: {instruction}: b{buffer} is not there yet.")
            kind, key, _ = contract.names[buffer]
            if kind in IN_PLACE and newest.get((kind, key), buffer) != buffer:
                raise StreamError(f"mesh {mesh}: {instruction}: b{buffer} was overwritten before.")
        for buffer in writes(instruction):
            if buffer in written:
                raise StreamError(f"mesh {mesh}: {instruction}: b{buffer} is written twice.")
            if contract.mesh_of[buffer] != mesh:
                raise StreamError(f"mesh {mesh}: {instruction}: b{buffer} belongs to mesh {contract.mesh_of[buffer]}.")
            written[buffer] = there[buffer] = None
            now += num_bytes[buffer]
            kind, key, _ = contract.names[buffer]
            if kind in IN_PLACE:
                newest[kind, key] = buffer
        peak = max(peak, now)
        if isinstance(instruction, Free):
            for buffer in instruction.buffers:
                if buffer not in there:
                    raise StreamError(f"mesh {mesh}: {instruction}: b{buffer} is not there to be let go of.")
                del there[buffer]
                gone[buffer] = None
                now -= num_bytes[buffer]
    leaked = [b for b in there if b not in contract.results and b not in contract.given.get(mesh, ())]
    if leaked:
        raise StreamError(f"mesh {mesh}: b{leaked[0]} is never let go of.")
    missing = [b for b in contract.results if contract.mesh_of[b] == mesh and b not in there]
    if missing:
        raise StreamError(f"b{missing[0]}, a result of the step, is not on mesh {mesh} at the end.")
    return peak
