"""A worker: executes the stream of one mesh on the devices of one host.

In:     its share of a job, once; then one call per step.
Out:    new state, which stays on the worker under keys; small results, which go to the driver.
Method: the stream is turned into calls of compiled programs, as in `runtime/pipeline.py`, and of its transports. One thread
        dispatches; other threads answer for its position at any time.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from autopar.errors import WorkerError
from autopar.mesh import ArrayType, Box
from autopar.partition.host_calls import with_callbacks
from autopar.partition.overlap import compile_lowered
from autopar.partition.task import DeviceProgram, jitted
from autopar.runtime.acts import Act, Live, act, end_of
from autopar.runtime.ray.functions import HostCalls, portable, unpacked_calls
from autopar.runtime.ray.seats import Seat
from autopar.runtime.ray.share import Key, Position, Report, Share, StepCall, Tiles
from autopar.runtime.ray.transport.parcels import box_shape, moved, own_boxes, pack, unpack
from autopar.runtime.ray.transport.transport import WaitError
from autopar.runtime.ray.worker.disk import Disk, read_tiles, unseen
from autopar.runtime.ray.worker.member import Member
from autopar.runtime.ray.worker.places import on_devices
from autopar.runtime.ray.worker.reading import Readings
from autopar.runtime.transfer import shards_by_device
from autopar.streams.instructions import BufferId, Recv, Run, Send, writes


@dataclass(slots=True)
class _Loaded:
    share: Share
    acts: list[Act]
    numbers: Live
    place: list[Callable[[Sequence[np.ndarray]], jax.Array]]
    boxes: list[list[Box]]
    calls: HostCalls


@dataclass(slots=True)
class _Step:
    """A step in progress; `before`: its arguments, by key, if the step may still be abandoned."""

    call: StepCall
    live: Live
    before: dict[Key, jax.Array]
    spans: dict[int, tuple[float, float]]


class Worker(Member):
    """One process of a job; an actor in `workers.py`."""

    def __init__(self, seat: Seat, wait_seconds: float):
        super().__init__(seat, wait_seconds)
        self.arrays: dict[Key, jax.Array] = {}
        self.loaded: dict[int, _Loaded] = {}
        self._given: dict[int, tuple[Share, dict[str, jax.stages.Compiled], HostCalls]] = {}
        self._step: _Step | None = None
        self._disk = Disk()
        self._readings = Readings(self.places)
        self._beside: dict[str, Disk | Readings] = {"disk": self._disk, "readings": self._readings}

    # Called at any time, on other threads.

    def pid(self) -> int:
        """The id of its process."""
        return os.getpid()

    def clock(self) -> float:
        """Seconds on its host's clock, whose zero is arbitrary."""
        return time.perf_counter()

    # Jobs.

    def compile(self, number: int, share: Share) -> None:
        """Receive its share of a job, and compile the programs."""
        calls = unpacked_calls(share.callbacks)
        programs = {}
        for program in share.programs:
            self._stand(0)
            programs[program.name] = self._compiled(program, calls.of.get(program.name))
        self._given[number] = share, programs, calls

    def load(self, number: int) -> None:
        """Prepare the stream of a job, together with the other workers, once all have compiled it."""
        self._stand(0)
        share, programs, calls = self._given.pop(number)
        sends, receives = self._ways(share.messages.values())
        watched = {program.name for program in share.programs if program.calls_host}
        self.loaded[number] = _Loaded(
            share,
            [act(at, i, programs, watched, sends, receives) for at, i in enumerate(share.stream)],
            {at: self._placed(share.types[at], np.int32(number)) for at, number in share.numbers.items()},
            [on_devices(share.types[at], self.places, taken) for at, taken in share.entries],
            [own_boxes(share.types[at], self.seat) for at, _ in share.entries],
            calls,
        )

    def _compiled(
        self, program: DeviceProgram[bytes], callbacks: Sequence[Callable[..., Any]] | None = None
    ) -> jax.stages.Compiled:
        """A program compiled for the devices of its mesh, with the host functions that it calls."""
        call = jax.export.deserialize(bytearray(program.code)).call
        code = with_callbacks(call, callbacks) if callbacks else call
        made = DeviceProgram(program.name, code, program.inputs, program.outputs, program.donated)
        function, operands = jitted(made, self.places.sharding)
        return compile_lowered(function.lower(*operands), dict(program.options), jax.default_backend())

    # Steps.

    def run(self, call: StepCall) -> tuple[list[list[np.ndarray]], Report | None]:
        """Execute one step, up to the pause if there is one.

        Returns:
            The packed parts of each result that this worker returns (none at the pause), and a report.

        Raises:
            WorkerError: An instruction failed; says which.
        """
        loaded = self.loaded[call.job]
        self._stand(0)
        try:
            step = self._begin(loaded, call)
            if loaded.share.pause is None:
                return self._end(loaded, step, 0)
            self._step = step
            self._carry_out(loaded, step, 0, loaded.share.pause)
            self._stand(loaded.share.pause)
            return [], self._report(loaded, step)
        except Exception as error:
            raise self._failure(error, loaded.share, call.step) from error

    def go_on(self) -> tuple[list[list[np.ndarray]], Report | None]:
        """Execute the rest of a step after the pause; as in `run`."""
        step, self._step = self._step, None
        assert step is not None, "no step is at its pause"
        loaded = self.loaded[step.call.job]
        assert loaded.share.pause is not None
        try:
            return self._end(loaded, step, loaded.share.pause)
        except Exception as error:
            raise self._failure(error, loaded.share, step.call.step) from error

    def leave(self) -> None:
        """Abandon a step at the pause: its arguments are available again."""
        step, self._step = self._step, None
        assert step is not None, "no step is at its pause"
        for transport in self._transports():
            transport.flush(lambda: self._stand(0))
        self.arrays |= step.before
        self._mailbox.leave(step.call.step)

    def _carry_out(self, loaded: _Loaded, step: _Step, start: int, stop: int) -> None:
        """Execute a part of the stream, and wait for the callbacks of its programs."""
        call, live, stream = step.call, step.live, loaded.share.stream
        for at in range(start, stop):
            instruction = stream[at]
            self._stand(at, instruction.message if isinstance(instruction, Recv) else None)
            begun = time.perf_counter()
            loaded.acts[at](call.step, live)
            if call.is_measured:
                jax.block_until_ready([live[b] for b in writes(instruction)])
                step.spans[at] = begun, time.perf_counter()
        for at in range(start, stop) if loaded.calls.of else ():
            if end_of(at) in live:
                self._stand(at)
                live.pop(end_of(at)).block_until_ready()

    def _report(self, loaded: _Loaded, step: _Step) -> Report | None:
        if not step.call.is_measured and not loaded.calls.of:
            return None
        raised = [dataclasses.replace(r, error=portable(r.error)) for r in loaded.calls.watch.take()]
        arrivals: dict[int, float] = {}
        for (_, message, _), when in self._mailbox.came.items():
            arrivals[message] = max(when, arrivals.get(message, 0.0))
        return Report(tuple(raised), step.spans, arrivals)

    def _end(self, loaded: _Loaded, step: _Step, start: int) -> tuple[list[list[np.ndarray]], Report | None]:
        """Execute the rest of the stream; its results and report."""
        share, call, live = loaded.share, step.call, step.live
        self._carry_out(loaded, step, start, len(share.stream))
        self._stand(len(share.stream))
        for transport in self._transports():
            transport.flush(lambda: self._stand(len(share.stream)))
        for key, at in zip(call.keep, share.kept, strict=True):
            self.arrays[key] = live[at]
        results = [self._parts(live[at], share.types[at], devices) for at, devices in share.fetched]
        for at in share.kept:
            jax.block_until_ready(live[at])
            self._stand(len(share.stream))
        return results, self._report(loaded, step)

    def _begin(self, loaded: _Loaded, call: StepCall) -> _Step:
        self._mailbox.came.clear()
        live = dict(loaded.numbers)
        values = iter(call.values)
        for number, ((at, _), key) in enumerate(zip(loaded.share.entries, call.given, strict=True)):
            if key is not None:
                live[at] = self._array(key)
                continue
            dtype = loaded.share.types[at].dtype
            parts = zip(next(values), loaded.boxes[number], strict=True)
            live[at] = loaded.place[number]([unpack(data, box_shape(box), dtype) for data, box in parts])
        given = () if loaded.share.pause is None else call.given
        before = {key: self.arrays[key] for key in given if key is not None}
        self.drop(call.dropped)
        self._part_from_others(loaded.share.entries, live)
        return _Step(call, live, before, {})

    def _part_from_others(self, entries: Sequence[tuple[BufferId, bool]], live: Live) -> None:
        """Copy donated arrays that have another user: state that a step passes on unchanged is one array under two keys."""
        users = Counter(map(id, self.arrays.values())) + Counter(id(live[at]) for at, _ in entries)
        for at, taken in entries:
            if taken and users[id(live[at])] > 1:
                users[id(live[at])] -= 1
                live[at] = jnp.array(live[at], copy=True)

    def _parts(self, array: jax.Array, kind: ArrayType, devices: Sequence[int]) -> list[np.ndarray]:
        return [pack(tile) for tile in self._tiles(array, kind, devices)]

    def _tiles(self, array: jax.Array, kind: ArrayType, devices: Sequence[int]) -> list[np.ndarray]:
        data = shards_by_device(array)
        own = self.places.devices(kind)
        # A copy, since it must outlive the array, whose memory the next step may overwrite.
        return [np.array(data[own[device - self.seat.first]]) for device in devices]

    def _failure(self, error: Exception, share: Share, step: int) -> WorkerError:
        at = min(self.position.at, len(share.stream) - 1)
        if isinstance(error, WaitError) and error.message is not None:
            at = next(
                k for k, i in enumerate(share.stream) if isinstance(i, Send | Recv) and i.message == error.message
            )
        instruction, microbatch = share.stream[at], share.microbatches[at]
        stage = instruction.stage if isinstance(instruction, Run) else self.seat.mesh
        name = f"{self.seat}, process {os.getpid()} on {socket.gethostname()}"
        wrong = f"{error}." if isinstance(error, WaitError) else f"{type(error).__name__}: {error}"
        text = f", microbatch {microbatch}" if microbatch >= 0 and not isinstance(instruction, Run) else ""
        return WorkerError(
            "a worker failed.",
            given=f"{name}, step {step}: {instruction}{text}",
            wrong=wrong,
            worker=name,
            stage=stage,
            instruction=str(instruction),
            microbatch=microbatch,
            waited_for=error.peer if isinstance(error, WaitError) else None,
        )

    # State.

    def put(self, key: Key, kind: ArrayType, tiles: Tiles) -> None:
        """Store an array; `tiles`: its distinct parts on this worker's devices, packed."""
        boxes = own_boxes(kind, self.seat)
        parts = [unpack(data, box_shape(box), kind.dtype) for data, box in zip(tiles, boxes, strict=True)]
        self.arrays[key] = on_devices(kind, self.places, True)(parts)

    def create(self, code: bytes, keys: Sequence[Key], kinds: Sequence[ArrayType]) -> None:
        """Run a program without operands and store its results."""
        program = DeviceProgram("create", code, (), tuple(kinds), ())
        self.arrays.update(zip(keys, self._compiled(program)(), strict=True))

    def fetch(self, key: Key, kind: ArrayType, devices: Sequence[int]) -> list[np.ndarray]:
        """Parts of an array, packed."""
        found = []
        for device in devices:
            self._stand(0)
            found += self._parts(self._array(key), kind, [device])
        return found

    def drop(self, keys: Sequence[Key]) -> None:
        """Free arrays."""
        for key in keys:
            self.arrays.pop(key, None)
            self._readings.arrays.pop(key, None)

    def _array(self, key: Key) -> jax.Array:
        """The array of a key; if it is of a batch that another thread has read, this thread owns it from now on."""
        if key not in self.arrays:
            self.arrays[key] = self._readings.arrays.pop(key)
        return self.arrays[key]

    def counts(self) -> dict[str, int]:
        """Bytes sent so far, bytes copied in memory for that, and the number of arrays held."""
        ways = self._transports()
        sent, copied = sum(w.sent_bytes for w in ways), sum(w.copied_bytes for w in ways)
        return {"sent_bytes": sent, "copied_bytes": copied, "arrays": len(self.arrays)}

    # Checkpoints: copies on the dispatching thread, between two steps.

    def unseen(self, token: str, word: str, writing: bool) -> str:
        """Why it cannot read, or write, beside a file; "": it can."""
        return unseen(token, word, writing)

    def read(self, folder: str, arrays: Sequence[tuple[Key, ArrayType, str, tuple[int, int]]]) -> None:
        """Read the parts of a checkpoint's arrays for this worker's devices, and store them.

        `arrays`: (key, type, name on disk, (offset, dim) in the array on disk).
        """
        boxes = [own_boxes(kind, self.seat) for _, kind, _, _ in arrays]
        there = [(name, [moved(box, *at) for box in own]) for (_, _, name, at), own in zip(arrays, boxes, strict=True)]
        for (key, kind, _, _), tiles in zip(arrays, read_tiles(folder, there), strict=True):
            self.arrays[key] = on_devices(kind, self.places, True)([tile.view(kind.dtype) for tile in tiles])
            self._stand(0)

    def take(self, save: int, places: Sequence[tuple[Key, ArrayType, int]]) -> None:
        """Copy parts of arrays for a save; `places`: (key, type, the device of the mesh that holds the part)."""
        tiles = []
        for key, kind, device in places:
            tiles += self._tiles(self.arrays[key], kind, (device,))
            self._stand(0)
        self._disk.take(save, tiles)

    # On threads of their own, beside the steps: files of a checkpoint, batches.

    def beside(self, part: Literal["disk", "readings"], method: str, *arguments: Any) -> Any:
        """Call a method of `Disk` or `Readings`."""
        return getattr(self._beside[part], method)(*arguments)

    def standing(self, part: Literal["disk", "readings"]) -> Position:
        """How long that part has made no progress."""
        return Position(0, None, self._beside[part].standing_seconds())

    def _placed(self, kind: ArrayType, value: Any) -> jax.Array:
        return on_devices(kind, self.places, True)([np.asarray(value)] * len(own_boxes(kind, self.seat)))
