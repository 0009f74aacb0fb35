"""What passes between driver and workers: a worker's share of a job, the call of one step, where a worker stands.

In:     (types only; `driver.py` makes them, `worker.py` takes them.)
Out:    `Share`, `StepCall`, `Report`, `Position`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.mesh import ArrayType
from autopar.partition.host_calls import Raised
from autopar.partition.task import DeviceProgram
from autopar.runtime.ray.transport.parcels import Message
from autopar.streams.instructions import BufferId, Instruction

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
        callbacks: Of its programs, packed (`functions.py`).
        pause: Position in the stream at which a step waits for the driver's word; None: nowhere.
    """

    programs: tuple[DeviceProgram[bytes], ...]
    stream: tuple[Instruction, ...]
    messages: Mapping[int, Message]
    types: Mapping[BufferId, ArrayType]
    microbatches: tuple[int, ...]
    numbers: Mapping[BufferId, int]
    entries: tuple[tuple[BufferId, bool], ...]
    kept: tuple[BufferId, ...]
    fetched: tuple[tuple[BufferId, tuple[int, ...]], ...]
    callbacks: bytes = b""
    pause: int | None = None


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
        is_measured: Whether each instruction is waited for, and its time taken.
    """

    job: int
    step: int
    given: tuple[Key | None, ...]
    values: tuple[Tiles, ...]
    keep: range
    dropped: tuple[Key, ...]
    is_measured: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker tells of a step beside its results.

    Attributes:
        raised: What callbacks have raised.
        spans: When instructions began and ended, by position in the stream; by the clock of the worker's host.
        arrivals: When messages had come.
    """

    raised: tuple[Raised, ...]
    spans: Mapping[int, tuple[float, float]]
    arrivals: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Position:
    """Where in its stream a worker stands, for how many seconds, and which message it waits for, if for any."""

    at: int
    awaited: int | None
    seconds: float = 0.0
