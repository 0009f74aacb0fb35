"""A worker: carries out the stream of one mesh on the devices of one host.

In:     its share of a job, once; then one call per step.
Out:    new state, which stays here under keys; small results, which go back.
Method: the stream is turned into calls of compiled programs, as in `runtime/pipeline.py`, and of its transport. One
        thread dispatches. Where it stands can be asked at any time.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

import jax
import numpy as np
from jax.sharding import NamedSharding

from autopar.errors import WorkerError
from autopar.mesh import LogicalMesh
from autopar.plan.instructions import BufferId, Free, Instruction, Recv, Run, Send
from autopar.plan.transfers import Box
from autopar.runtime.ray.job import BufferType, ProgramCode
from autopar.runtime.ray.parcels import Message, box_shape, own_boxes, pack, unpack
from autopar.runtime.ray.seats import Seat
from autopar.runtime.ray.transport import Mailbox, ObjectStore, Transport, WaitError, on_devices

Key = int
Held = dict[BufferId, Any]
Tiles = Sequence[np.ndarray]


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
        step: Number of the step it is at.
        at: Position in its stream.
        awaited: Message it waits for; None: it does not wait.
    """

    step: int
    at: int
    awaited: int | None


@dataclass(slots=True)
class _Loaded:
    share: Share
    acts: list[Callable[[int, Held], None]]
    numbers: Held
    place: list[Callable[[Sequence[np.ndarray]], jax.Array]]
    boxes: list[list[Box]] = field(default_factory=list)


class Worker:
    """One process of a job; an actor in `workers.py`."""

    def __init__(self, seat: Seat, wait_seconds: float):
        self.seat, self._wait_seconds = seat, wait_seconds
        self.position = Position(-1, 0, None)
        self.arrays: dict[Key, jax.Array] = {}
        self.loaded: dict[int, _Loaded] = {}
        self._mailbox = Mailbox()
        self._meshes: dict[LogicalMesh, jax.sharding.Mesh] = {}
        self._transport: Transport

    # Asked at any time, by other threads.

    def where(self) -> Position:
        """Where it stands; that it answers says that it lives."""
        return self.position

    def pid(self) -> int:
        """Its process."""
        return os.getpid()

    def deliver(self, step: int, message: int, source: int, tiles: Tiles) -> None:
        """A parcel of another worker."""
        self._mailbox.put((step, message, source), tiles)

    # Before the first step.

    def coordinator(self) -> str:
        """An address at which the workers of its mesh can meet."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return f"{_own_address()}:{port}"

    def join(self, coordinator: str, count: int) -> None:
        """Form one group of processes with the other workers of its mesh."""
        jax.distributed.initialize(coordinator, count, self.seat.rank)

    def connect(self, peers: Mapping[int, Any]) -> int:
        """Get to know the other workers' actors.

        Returns:
            How many devices it has.
        """
        posts = {number: _post(peer) for number, peer in peers.items()}
        self._transport = ObjectStore(self.seat, self, self._mailbox, posts, self._wait_seconds)
        return jax.local_device_count()

    def load(self, number: int, share: Share) -> None:
        """Compile a job's programs and prepare its stream."""
        programs = {program.name: self._compiled(program) for program in share.programs}
        self.loaded[number] = _Loaded(
            share,
            [self._act(instruction, share, programs) for instruction in share.stream],
            {at: self._placed(share.types[at], np.int32(number), True) for at, number in share.numbers.items()},
            [on_devices(share.types[at], self.seat, self, taken) for at, taken in share.entries],
            [own_boxes(share.types[at], self.seat) for at, _ in share.entries],
        )

    def devices(self, kind: BufferType) -> Sequence[jax.Device]:
        """As of `Places`."""
        places = self.mesh_of(kind.mesh).devices.flat
        return [places[device] for device in self.seat.devices]

    def sharding(self, kind: BufferType) -> NamedSharding:
        """As of `Places`."""
        return kind.on(self.mesh_of(kind.mesh))

    def mesh_of(self, mesh: LogicalMesh) -> jax.sharding.Mesh:
        """The logical mesh over the devices of all its workers."""
        if mesh not in self._meshes:
            devices = np.array(jax.devices()[: mesh.num_devices])
            self._meshes[mesh] = jax.sharding.Mesh(devices.reshape(mesh.shape), mesh.axis_names)
        return self._meshes[mesh]

    def _compiled(self, program: ProgramCode) -> jax.stages.Compiled:
        call = jax.export.deserialize(bytearray(program.code)).call

        def function(*arrays: jax.Array) -> Any:
            return call(*arrays)

        function.__name__ = function.__qualname__ = program.name.replace("/", "_")
        shardings = tuple(self.sharding(kind) for kind in program.inputs)
        jitted = jax.jit(
            function,
            in_shardings=shardings,
            out_shardings=[self.sharding(kind) for kind in program.outputs],
            donate_argnums=tuple(k for k, donated in enumerate(program.donated) if donated),
        )
        structs = [
            jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=sharding)
            for kind, sharding in zip(program.inputs, shardings, strict=True)
        ]
        return jitted.lower(*structs).compile()

    def _act(
        self, instruction: Instruction, share: Share, programs: Mapping[str, jax.stages.Compiled]
    ) -> Callable[[int, Held], None]:
        match instruction:
            case Run(program, _, _, inputs, outputs):
                compiled = programs[program]

                def run(step: int, held: Held) -> None:
                    held.update(zip(outputs, compiled(*[held[at] for at in inputs]), strict=True))

                return run
            case Send(sent, _, message):
                send = self._transport.sender(share.messages[message])
                return lambda step, held: send(step, [held[at] for at in sent])
            case Recv(received, _, message):
                receive = self._transport.receiver(share.messages[message])
                return lambda step, held: held.update(zip(received, receive(step), strict=True))
            case Free(freed):

                def free(step: int, held: Held) -> None:
                    for at in freed:
                        held.pop(at, None)

                return free
            case _:
                assert_never(instruction)

    # Steps.

    def run(self, call: StepCall) -> list[list[np.ndarray]]:
        """Carry out one step.

        Returns:
            For each result that it hands out, its parts, packed.

        Raises:
            WorkerError: Something went wrong; says at which instruction.
        """
        loaded = self.loaded[call.job]
        share = loaded.share
        try:
            held = self._begin(loaded, call)
            for at, (instruction, act) in enumerate(zip(share.stream, loaded.acts, strict=True)):
                awaited = instruction.message if isinstance(instruction, Recv) else None
                self.position = Position(call.step, at, awaited)
                act(call.step, held)
            self.position = Position(call.step, len(share.stream), None)
            self._transport.flush()
            for key, at in zip(call.keep, share.kept, strict=True):
                self.arrays[key] = held[at]
            results = [self._parts(held[at], share.types[at], devices) for at, devices in share.fetched]
            jax.block_until_ready([held[at] for at in share.kept])
            return results
        except Exception as error:
            raise self._failure(error, share, call.step) from error

    def _begin(self, loaded: _Loaded, call: StepCall) -> Held:
        held = dict(loaded.numbers)
        values = iter(call.values)
        for number, ((at, _), key) in enumerate(zip(loaded.share.entries, call.given, strict=True)):
            if key is not None:
                held[at] = self.arrays[key]
                continue
            dtype = loaded.share.types[at].dtype
            parts = zip(next(values), loaded.boxes[number], strict=True)
            held[at] = loaded.place[number]([unpack(data, box_shape(box), dtype) for data, box in parts])
        self.drop(call.dropped)
        return held

    def _parts(self, array: jax.Array, kind: BufferType, devices: Sequence[int]) -> list[np.ndarray]:
        data = {shard.device: shard.data for shard in array.addressable_shards}
        own = self.devices(kind)
        # A copy: what is handed out must outlive the array, whose memory the next step may take.
        return [pack(np.array(data[own[device - self.seat.first]])) for device in devices]

    def _failure(self, error: Exception, share: Share, step: int) -> WorkerError:
        at = min(self.position.at, len(share.stream) - 1)
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
            waited_for=error.source if isinstance(error, WaitError) else None,
        )

    # State.

    def put(self, key: Key, kind: BufferType, tiles: Tiles) -> None:
        """Hold an array; `tiles` are its different parts on this worker's devices, packed."""
        boxes = own_boxes(kind, self.seat)
        parts = [unpack(data, box_shape(box), kind.dtype) for data, box in zip(tiles, boxes, strict=True)]
        self.arrays[key] = on_devices(kind, self.seat, self, True)(parts)

    def create(self, code: bytes, keys: Sequence[Key], kinds: Sequence[BufferType]) -> None:
        """Run a program without operands and hold its results."""
        program = ProgramCode("create", code, (), tuple(kinds), ())
        self.arrays.update(zip(keys, self._compiled(program)(), strict=True))

    def fetch(self, key: Key, kind: BufferType, devices: Sequence[int]) -> list[np.ndarray]:
        """Parts of an array, packed."""
        return self._parts(self.arrays[key], kind, devices)

    def drop(self, keys: Sequence[Key]) -> None:
        """Let go of arrays."""
        for key in keys:
            self.arrays.pop(key, None)

    def counts(self) -> dict[str, int]:
        """Bytes that it sent, and how many were copied on the way; arrays that it holds."""
        transport = self._transport
        sent, copied = getattr(transport, "sent_bytes", 0), getattr(transport, "copied_bytes", 0)
        return {"sent_bytes": sent, "copied_bytes": copied, "arrays": len(self.arrays)}

    def _placed(self, kind: BufferType, value: Any, own_memory: bool) -> jax.Array:
        return on_devices(kind, self.seat, self, own_memory)([np.asarray(value)] * len(own_boxes(kind, self.seat)))


def _post(peer: Any) -> Callable[[int, int, int, Tiles], None]:
    deliver = peer.deliver.options(concurrency_group="mail")

    def post(step: int, message: int, source: int, tiles: Tiles) -> None:
        deliver.remote(step, message, source, tiles)

    return post


def _own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: asks which address leads out
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
