"""Plans the messages between workers: which worker sends which tiles to which.

In:     types of a message's values on both meshes, the seats of both.
Out:    `Message`s with `Parcel`s, the tiles that one worker sends to another; the parts of a value that a worker holds.
Method: a worker gets every part that its devices want once, even if several of them hold copies. Holders of equal parts take
        turns at sending, as in `streams/transfers.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.mesh import ArrayType, Box
from autopar.runtime.ray.job import Job
from autopar.runtime.ray.seats import Seat, by_mesh
from autopar.streams.instructions import BufferId, MeshId, Recv, Run, Send
from autopar.streams.transfers import tiles_of


@dataclass(frozen=True, slots=True)
class Piece:
    """A tile of value number `value` of a message: the device of the sending mesh that holds it, its box in the whole array."""

    value: int
    device: int
    box: Box


@dataclass(frozen=True, slots=True)
class Parcel:
    """The tiles of a message that one worker sends to another."""

    source: int
    target: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """A message from one mesh to another.

    Attributes:
        number: The message's number.
        source: The sending mesh.
        target: The receiving mesh.
        turn: Position of its `Send` in the sender's stream: the order of messages from this mesh.
        sent: Types of its values on the sending mesh.
        received: Types of its values on the receiving mesh.
        parcels: The tiles sent from worker to worker.
        overwritten: For each value, whether the sender overwrites its memory later in the step.
        taken: For each value, whether the receiver overwrites its memory, in this step or the next.
    """

    number: int
    source: MeshId
    target: MeshId
    turn: int
    sent: tuple[ArrayType, ...]
    received: tuple[ArrayType, ...]
    parcels: tuple[Parcel, ...]
    overwritten: tuple[bool, ...]
    taken: tuple[bool, ...]


def messages_of(job: Job, seats: Sequence[Seat]) -> dict[int, Message]:
    """All messages of a step, by number."""
    of_mesh = by_mesh(seats)
    sends = {
        i.message: (mesh, turn, i.buffers)
        for mesh, stream in job.streams.instructions.items()
        for turn, i in enumerate(stream)
        if isinstance(i, Send)
    }
    over = _taken_over(job)
    # A result that stays on the worker is overwritten by the next step.
    taken = over | {at for at in job.streams.results if at is not None}
    found = {}
    for mesh, stream in job.streams.instructions.items():
        for instruction in stream:
            if isinstance(instruction, Recv):
                source, turn, buffers = sends[instruction.message]
                sent = tuple(job.types[at] for at in buffers)
                received = tuple(job.types[at] for at in instruction.buffers)
                found[instruction.message] = Message(
                    instruction.message,
                    source,
                    mesh,
                    turn,
                    sent,
                    received,
                    parcels_of(sent, received, of_mesh[source], of_mesh[mesh]),
                    tuple(at in over for at in buffers),
                    tuple(at in taken for at in instruction.buffers),
                )
    return found


def _taken_over(job: Job) -> set[BufferId]:
    """Buffers that a program overwrites."""
    donated: Mapping[str, tuple[bool, ...]] = {p.name: p.donated for own in job.programs.values() for p in own}
    return {
        at
        for stream in job.streams.instructions.values()
        for instruction in stream
        if isinstance(instruction, Run)
        for at, over in zip(instruction.inputs, donated[instruction.program], strict=True)
        if over
    }


def parcels_of(
    sent: Sequence[ArrayType], received: Sequence[ArrayType], sources: Sequence[Seat], targets: Sequence[Seat]
) -> tuple[Parcel, ...]:
    """The parcels of one message, whose values have these types on the sending and the receiving mesh."""
    seat_of = {device: seat.number for seat in sources for device in seat.devices}
    of_first, load = {seat.first: seat.number for seat in targets}, [0] * len(seat_of)
    pieces: dict[tuple[int, int], list[Piece]] = {}
    for value, (have, want) in enumerate(zip(sent, received, strict=True)):
        wanted = ((seat.first, box) for seat in targets for box in own_boxes(want, seat))
        for tile in tiles_of(have.boxes(), wanted, load):
            ends = seat_of[tile.source], of_first[tile.target]
            pieces.setdefault(ends, []).append(Piece(value, tile.source, tile.box))
    return tuple(Parcel(source, target, tuple(own)) for (source, target), own in pieces.items())


def own_boxes(kind: ArrayType, seat: Seat) -> list[Box]:
    """The boxes of the distinct parts of an array that a worker's devices hold."""
    held = kind.boxes()
    return list(dict.fromkeys(held[device] for device in seat.devices))


def holders_of(kind: ArrayType, seats: Sequence[Seat]) -> dict[int, list[tuple[int, Box]]]:
    """One holder of each distinct part of an array: (device, box) by worker."""
    held, seen = kind.boxes(), dict[Box, None]()
    found: dict[int, list[tuple[int, Box]]] = {}
    for seat in seats:
        for device in seat.devices:
            if held[device] not in seen:
                seen[held[device]] = None
                found.setdefault(seat.number, []).append((device, held[device]))
    return found


def slices(box: Box, within: Box) -> tuple[slice, ...]:
    """A box of an array, as an index into an enclosing box."""
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(box, within, strict=True))


def pack(array: np.ndarray) -> np.ndarray:
    """An array as bytes, which Ray sends without a copy whatever the dtype; copies only arrays that are not contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def unpack(data: np.ndarray, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """The array of packed bytes, without a copy."""
    return data.view(dtype).reshape(tuple(shape))


def moved(box: Box, by: int, dim: int) -> Box:
    """A box, moved along a dim: from a part that begins at `by` to the whole."""
    if not by:
        return box
    start, stop = box[dim]
    return (*box[:dim], (start + by, stop + by), *box[dim + 1 :])


def box_shape(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)
