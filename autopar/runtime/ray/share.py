"""What passes between driver and workers: a worker's share of a job, the call of one step, where a worker stands.

In:     (types only; `driver.py` makes them, `worker.py` takes them.)
Out:    `Share`, `StepCall`, `Position`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.plan.instructions import BufferId, Instruction
from autopar.runtime.ray.job import BufferType, ProgramCode
from autopar.runtime.ray.parcels import Message

Key = int
"""Under which a worker holds an array."""
Tiles = Sequence[np.ndarray]
"""Parts of arrays, packed."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one worker does of a job.

    Attributes:
        programs: Of its mesh.
        stream: Of its mesh.
        messages: Those of the stream, by number.
        types: Of the buffers of its mesh.
        microbatches: Of each instruction; -1: none.
        numbers: Buffers that hold a microbatch's number, and which.
        entries: Buffers that hold arguments when a step begins, and whether a program takes their memory.
        kept: Buffers of results that stay here.
        fetched: Results of which this worker hands out parts: buffer, devices.
    """

    programs: tuple[ProgramCode, ...]
    stream: tuple[Instruction, ...]
    messages: Mapping[int, Message]
    types: Mapping[BufferId, BufferType]
    microbatches: tuple[int, ...]
    numbers: Mapping[BufferId, int]
    entries: tuple[tuple[BufferId, bool], ...]
    kept: tuple[BufferId, ...]
    fetched: tuple[tuple[BufferId, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class StepCall:
    """One step for one worker.

    Attributes:
        job: Which.
        step: Its number, never used twice.
        given: For each entry the key of the array that is here; None: it comes along.
        values: Those that come along, in order: the different parts that this worker's devices hold, packed.
        keep: Keys of the results that stay here.
        dropped: Keys of arrays that no one wants any more; first of all those whose memory the step takes.
    """

    job: int
    step: int
    given: tuple[Key | None, ...]
    values: tuple[Tiles, ...]
    keep: range
    dropped: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Position:
    """Where a worker stands.

    Attributes:
        at: Position in its stream.
        awaited: Message it waits for; None: it does not wait.
        seconds: How long it has stood there.
    """

    at: int
    awaited: int | None
    seconds: float = 0.0
