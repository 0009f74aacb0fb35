"""Types that driver and workers exchange: a worker's share of a job, the call of one step, reports, positions.

In:     (types only; exchanged by `driver/` and `worker/`.)
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
"""The key of an array that a worker holds."""
Tiles = Sequence[np.ndarray]
"""Parts of arrays, as bytes (`parcels.pack`)."""


@dataclass(frozen=True, slots=True)
class Share:
    """One worker's share of a job.

    Attributes:
        programs: The programs of its mesh.
        stream: The instructions of its mesh.
        messages: The messages of the stream, by number.
        types: The types of its mesh's buffers.
        microbatches: The microbatch of each instruction; -1: none.
        numbers: Buffers that hold the number of a microbatch -> that number.
        entries: Buffers that hold arguments when a step begins, and whether these are donated.
        kept: Buffers of results that stay on the worker.
        fetched: Results of which this worker returns parts: (buffer, devices).
        callbacks: The callbacks of its programs, pickled (`functions.py`).
        pause: Position in the stream at which a step waits for the driver to continue; None: nowhere.
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
    """The call of one step on one worker.

    Attributes:
        job: The job's number.
        step: The step's number, never used twice.
        given: For each entry, the key of the array that the worker holds; None: it is in `values`.
        values: The other entries, in order: the distinct parts that this worker's devices hold, packed.
        keep: Keys for the results that stay on the worker.
        dropped: Keys of arrays to free: those that are donated, and those that nobody uses any more.
        is_measured: Whether to wait for each instruction, and time it.
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
    """What a worker reports of a step besides its results.

    Attributes:
        raised: The exceptions of callbacks.
        spans: When instructions began and ended, by position in the stream, on the clock of the worker's host.
        arrivals: When messages had arrived, by number.
    """

    raised: tuple[Raised, ...]
    spans: Mapping[int, tuple[float, float]]
    arrivals: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Position:
    """A worker's position in its stream, for how many seconds it has been there, and the message that it waits for, if any."""

    at: int
    awaited: int | None
    seconds: float = 0.0
