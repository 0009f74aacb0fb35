"""Simulates the streams: the time of each instruction, and the bytes that each mesh holds.

In:     streams, seconds per program, seconds per message, bytes per buffer, working bytes per program.
Out:    `Simulation`: start and end of every run and message, the length of the step, the peak memory of each mesh.
Method: discrete events, in time that grows with the number of instructions and not with the number of meshes.
        Each mesh executes its instructions in order. A send takes none of the mesh's time; messages between two meshes
        are transmitted one after the other; a receive waits for the arrival.
        Where meshes share the cores of a host, runs slow each other down, and so do messages: the cores copy them, and
        the sending mesh does nothing else meanwhile.
        A buffer is live from the start of its run (or of its message's send) until it is freed; a sent one at least until
        its message has arrived, waiting for earlier messages included.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.streams.instructions import BufferId, Free, Instruction, MeshId, Recv, Run, Send


@dataclass(frozen=True, slots=True)
class Interval:
    """A run, or a message that `mesh` sends; times in seconds from the start of the step."""

    mesh: MeshId
    start: float
    end: float
    instruction: Run | Send


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """A simulated step.

    Attributes:
        seconds: Length of the step.
        intervals: Runs and messages, by start.
        peak_bytes: Per mesh, peak bytes on one device.
        busy_seconds: Per mesh, time spent in runs.
        watch: Per mesh, its memory over the step, if it was watched.
    """

    seconds: float
    intervals: tuple[Interval, ...]
    peak_bytes: Mapping[MeshId, int]
    busy_seconds: Mapping[MeshId, float]
    watch: Mapping[MeshId, Watch] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Watch:
    """The memory of a mesh during a step.

    Attributes:
        levels: (time, bytes of live buffers from then on).
        runs: (start, end, peak bytes) of each run.
        fullest: The buffers live at the peak.
        working_bytes: Bytes that a run needs at the peak, beyond `fullest`.
    """

    levels: list[tuple[float, int]] = field(default_factory=list)
    runs: list[tuple[float, float, int]] = field(default_factory=list)
    fullest: tuple[BufferId, ...] = ()
    working_bytes: int = 0


def simulate(
    streams: Mapping[MeshId, Sequence[Instruction]],
    run_seconds: Callable[[Run], float],
    message_seconds: Callable[[MeshId, Send], float],
    buffer_bytes: Sequence[int],
    working_bytes: Callable[[Run], int],
    resident: Mapping[MeshId, Sequence[BufferId]] | None = None,
    overwritten: Callable[[Run], Sequence[BufferId]] = lambda run: (),
    watched: bool = False,
    speeds: Callable[[Collection[MeshId]], Mapping[MeshId, float]] | None = None,
) -> Simulation:
    """Simulate the streams.

    Args:
        streams: The instructions of each mesh.
        run_seconds: Length of a run.
        message_seconds: Length of a message, by its sender.
        buffer_bytes: Bytes of each buffer on one device.
        working_bytes: Peak bytes that a run needs, without its operands and the results that overwrite them.
        resident: Per mesh, buffers that are live when the step begins.
        overwritten: Operands of a run whose memory its results take.
        watched: Whether to record each mesh's memory over the step, and its contents at the peak.
        speeds: From the meshes that run at once to the speed of each; None: each always at speed 1.

    Raises:
        AssertionError: The streams deadlock.
    """
    memory = {mesh: _Memory(buffer_bytes, (resident or {}).get(mesh, ()), watched) for mesh in streams}
    return _Simulator(streams, run_seconds, message_seconds, working_bytes, overwritten, memory, speeds).simulation()


class _Memory:
    """The memory of one mesh: bytes on one device, now and at the peak so far."""

    def __init__(self, num_bytes: Sequence[int], resident: Sequence[BufferId], watched: bool):
        self.num_bytes = num_bytes
        self.watch = Watch() if watched else None
        self.alive = dict.fromkeys(resident)
        self.now = self.peak = self.sum(self.alive)
        self.sent_until: dict[BufferId, float] = {}
        self.leaving: list[tuple[float, BufferId]] = []
        self.write_down(0.0)

    def sum(self, buffers: Iterable[BufferId]) -> int:
        return sum(self.num_bytes[b] for b in buffers)

    def hold(self, buffers: Sequence[BufferId]) -> None:
        new = dict.fromkeys(b for b in buffers if b not in self.alive)
        self.alive |= new
        self.now += self.sum(new)
        self.touch(0)

    def touch(self, further_bytes: int) -> None:
        """Count bytes that are live for a moment beside the buffers."""
        if self.watch is not None and self.now + further_bytes >= self.peak:
            self.watch.fullest, self.watch.working_bytes = tuple(self.alive), further_bytes
        self.peak = max(self.peak, self.now + further_bytes)

    def drop(self, buffers: Iterable[BufferId]) -> None:
        gone = [b for b in buffers if b in self.alive]
        for b in gone:
            del self.alive[b]
        self.now -= self.sum(gone)

    def send(self, buffers: Sequence[BufferId], until: float) -> None:
        for b in buffers:
            self.sent_until[b] = max(until, self.sent_until.get(b, 0.0))

    def free(self, buffers: Sequence[BufferId], time: float) -> None:
        """Free buffers: at once, or when the messages that send them have arrived."""
        for b in buffers:
            heapq.heappush(self.leaving, (max(time, self.sent_until.get(b, 0.0)), b))
        self.pass_to(time)

    def pass_to(self, time: float) -> None:
        """Free the buffers whose messages have arrived by this time."""
        while self.leaving and self.leaving[0][0] <= time:
            until, buffer = heapq.heappop(self.leaving)
            self.drop((buffer,))
            self.write_down(until)

    def write_down(self, time: float) -> None:
        """Record the bytes that are live from this time on."""
        if self.watch is not None:
            self.watch.levels.append((time, self.now))


@dataclass(slots=True, eq=False)
class _Running:
    """A run or message in progress on shared cores: its seconds left at speed 1, and its mesh's peak bytes meanwhile."""

    instruction: Run | Send
    start: float
    left: float
    most_bytes: int


@dataclass(eq=False)
class _Simulator:
    """The state of a simulation; fields as in `simulate`."""

    streams: Mapping[MeshId, Sequence[Instruction]]
    run_seconds: Callable[[Run], float]
    message_seconds: Callable[[MeshId, Send], float]
    working_bytes: Callable[[Run], int]
    overwritten: Callable[[Run], Sequence[BufferId]]
    memory: Mapping[MeshId, _Memory]
    speeds: Callable[[Collection[MeshId]], Mapping[MeshId, float]] | None

    def __post_init__(self) -> None:
        streams, self.now = self.streams, 0.0
        self.running: dict[MeshId, _Running] = {}
        self.at, self.clock = dict.fromkeys(streams, 0), dict.fromkeys(streams, 0.0)
        self.busy = dict.fromkeys(streams, 0.0)
        self.arrived: dict[int, float] = {}
        self.lanes: dict[tuple[MeshId, MeshId], float] = {}
        self.intervals: list[Interval] = []
        self.queue: list[tuple[float, MeshId]] = []
        self.waiting: dict[int, MeshId] = {}
        self.receiving = {
            i.message: (mesh, i.buffers) for mesh, stream in streams.items() for i in stream if isinstance(i, Recv)
        }

    def simulation(self) -> Simulation:
        for mesh in self.streams:
            self.enqueue(mesh)
        while self.queue or self.running:
            done = self.first_done()
            if done is not None:
                self.enqueue(done)
                continue
            time, mesh = heapq.heappop(self.queue)
            self.work_until(time)
            self.advance(time, mesh)
            if mesh not in self.running:
                self.enqueue(mesh)
        left = [mesh for mesh, stream in self.streams.items() if self.at[mesh] < len(stream)]
        assert not left, "the streams wait for each other"
        for memory in self.memory.values():
            memory.pass_to(math.inf)
        seconds = max([0.0, *(i.end for i in self.intervals)])
        self.intervals.sort(key=lambda i: (i.start, i.mesh))
        peaks = {mesh: memory.peak for mesh, memory in self.memory.items()}
        watch = {mesh: memory.watch for mesh, memory in self.memory.items() if memory.watch is not None}
        return Simulation(seconds, tuple(self.intervals), peaks, self.busy, watch)

    def enqueue(self, mesh: MeshId) -> None:
        """Queue the next instruction of a mesh, unless it waits for a message that has not been sent."""
        if self.at[mesh] == len(self.streams[mesh]):
            return
        instruction, time = self.streams[mesh][self.at[mesh]], self.clock[mesh]
        if isinstance(instruction, Recv):
            if instruction.message not in self.arrived:
                self.waiting[instruction.message] = mesh
                return
            time = max(time, self.arrived[instruction.message])
        heapq.heappush(self.queue, (time, mesh))

    def advance(self, start: float, mesh: MeshId) -> None:
        """Execute the next instruction of a mesh. No later call has an earlier start."""
        self.memory[mesh].pass_to(start)
        instruction = self.streams[mesh][self.at[mesh]]
        self.at[mesh] += 1
        match instruction:
            case Run():
                self.run(mesh, start, instruction)
            case Send():
                self.send(mesh, start, instruction)
            case Recv():
                self.clock[mesh] = start
            case Free(buffers):
                self.memory[mesh].free(buffers, start)
        self.memory[mesh].write_down(start)

    def run(self, mesh: MeshId, start: float, run: Run) -> None:
        seconds, memory, gone = self.run_seconds(run), self.memory[mesh], self.overwritten(run)
        working = max(self.working_bytes(run), memory.sum(run.outputs) - memory.sum(gone))
        memory.touch(working)
        going = _Running(run, start, seconds, memory.now + working)
        memory.drop(gone)
        memory.hold(run.outputs)
        if self.speeds is None:
            self.end_run(mesh, going, start + seconds)
        else:
            self.running[mesh] = going

    def end_run(self, mesh: MeshId, run: _Running, end: float) -> None:
        self.clock[mesh] = end
        if isinstance(run.instruction, Send):
            self.arrive(mesh, run.instruction, run.start, end)
            return
        self.intervals.append(Interval(mesh, run.start, end, run.instruction))
        self.busy[mesh] += end - run.start
        watch = self.memory[mesh].watch
        if watch is not None:
            watch.runs.append((run.start, end, run.most_bytes))

    def first_done(self) -> MeshId | None:
        """End the run in progress that ends before the next queued event; its mesh, None: there is none."""
        if not self.running or self.speeds is None:
            return None
        speeds = self.speeds(tuple(self.running))
        end, mesh = min((self.now + run.left / speeds[mesh], mesh) for mesh, run in self.running.items())
        if self.queue and self.queue[0][0] < end:
            return None
        self.work_until(end)
        self.end_run(mesh, self.running.pop(mesh), end)
        return mesh

    def work_until(self, time: float) -> None:
        """Advance the runs in progress to `time`; none of them ends before it."""
        speeds = self.speeds(tuple(self.running)) if self.speeds is not None and self.running else {}
        for mesh, run in self.running.items():
            run.left = max(0.0, run.left - (time - self.now) * speeds[mesh])
        self.now = max(self.now, time)

    def send(self, mesh: MeshId, start: float, send: Send) -> None:
        if send.message in self.receiving:
            peer, buffers = self.receiving[send.message]
            self.memory[peer].pass_to(start)
            self.memory[peer].hold(buffers)
            self.memory[peer].write_down(start)
        seconds = self.message_seconds(mesh, send)
        if self.speeds is None:
            begin = max(start, self.lanes.get((mesh, send.peer), 0.0))
            self.arrive(mesh, send, begin, begin + seconds)
        else:
            self.running[mesh] = _Running(send, start, seconds, 0)

    def arrive(self, mesh: MeshId, send: Send, begin: float, end: float) -> None:
        """Record a message, transmitted from `begin` to `end`, and wake its receiver if it waits."""
        self.lanes[mesh, send.peer] = self.arrived[send.message] = end
        self.intervals.append(Interval(mesh, begin, end, send))
        self.memory[mesh].send(send.buffers, end)
        if send.message in self.waiting:
            self.enqueue(self.waiting.pop(send.message))
