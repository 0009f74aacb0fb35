"""A simulator: the streams on a clock, and the bytes that each mesh holds at every moment.

In:     streams, seconds per program, seconds per message, bytes per buffer, bytes a program works with.
Out:    `Simulation`: every run and message with start and end, the length of the step, the peak per mesh.
Method: each mesh does its instructions in order; a run takes its time, sending takes none of the mesh's, a message
        arrives after its time and messages between two meshes go one after the other; receiving waits for the arrival.
        A buffer is there from its run's start (or its message's sending) until it is let go of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopar.plan.instructions import BufferId, Free, Instruction, MeshId, Recv, Run, Send


@dataclass(frozen=True, slots=True)
class Interval:
    """Something that takes time.

    Attributes:
        mesh: Where; of a message the sender.
        start: Seconds from the beginning of the step.
        end: Likewise.
        instruction: The `Run` or `Send`.
    """

    mesh: MeshId
    start: float
    end: float
    instruction: Run | Send


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """A step on the clock.

    Attributes:
        seconds: Its length.
        intervals: Runs and messages, by start.
        peak_bytes: Per mesh, most bytes on one device.
        busy_seconds: Per mesh, time spent in runs.
    """

    seconds: float
    intervals: tuple[Interval, ...]
    peak_bytes: Mapping[MeshId, int]
    busy_seconds: Mapping[MeshId, float]


def simulate(
    streams: Mapping[MeshId, Sequence[Instruction]],
    run_seconds: Callable[[Run], float],
    message_seconds: Callable[[MeshId, Send], float],
    buffer_bytes: Sequence[int],
    working_bytes: Callable[[Run], int],
    held: Mapping[MeshId, Sequence[BufferId]] | None = None,
    overwritten: Callable[[Run], Sequence[BufferId]] = lambda run: (),
) -> Simulation:
    """Run the streams on a clock.

    Args:
        streams: Per mesh.
        run_seconds: Length of a run.
        message_seconds: Length of a message of a mesh.
        buffer_bytes: Bytes of each buffer on one device.
        working_bytes: Bytes that a run needs at most, its operands left out.
        held: Per mesh, buffers that are there when the step begins.
        overwritten: Operands of a run whose memory its results take.

    Raises:
        AssertionError: The streams wait for each other.
    """
    at, clock = dict.fromkeys(streams, 0), dict.fromkeys(streams, 0.0)
    arrived: dict[int, float] = {}
    lanes: dict[tuple[MeshId, MeshId], float] = {}
    intervals: list[Interval] = []
    busy = dict.fromkeys(streams, 0.0)
    alive = {mesh: dict.fromkeys((held or {}).get(mesh, ())) for mesh in streams}
    now = {mesh: sum(buffer_bytes[b] for b in alive[mesh]) for mesh in streams}
    peak = dict(now)
    receiving = {
        i.message: (mesh, i.buffers) for mesh, stream in streams.items() for i in stream if isinstance(i, Recv)
    }

    def hold(mesh: MeshId, buffers: Sequence[BufferId]) -> None:
        for b in buffers:
            if b not in alive[mesh]:
                alive[mesh][b] = None
                now[mesh] += buffer_bytes[b]
        peak[mesh] = max(peak[mesh], now[mesh])

    def drop(mesh: MeshId, buffers: Sequence[BufferId]) -> None:
        for b in buffers:
            if b in alive[mesh]:
                del alive[mesh][b]
                now[mesh] -= buffer_bytes[b]

    def ready(mesh: MeshId) -> float | None:
        """When the next instruction of a mesh can begin; None: not known yet, or none is left."""
        if at[mesh] == len(streams[mesh]):
            return None
        instruction = streams[mesh][at[mesh]]
        if isinstance(instruction, Recv):
            return max(clock[mesh], arrived[instruction.message]) if instruction.message in arrived else None
        return clock[mesh]

    left = sum(map(len, streams.values()))
    while left:
        times = [(t, mesh) for mesh in streams if (t := ready(mesh)) is not None]
        assert times, "the streams wait for each other"
        start, mesh = min(times)
        instruction = streams[mesh][at[mesh]]
        at[mesh] += 1
        left -= 1
        match instruction:
            case Run(outputs=outputs):
                seconds = run_seconds(instruction)
                intervals.append(Interval(mesh, start, start + seconds, instruction))
                clock[mesh] = start + seconds
                busy[mesh] += seconds
                gone = overwritten(instruction)
                drop(mesh, gone)
                extra = sum(buffer_bytes[b] for b in gone)
                made = sum(buffer_bytes[b] for b in outputs)
                peak[mesh] = max(peak[mesh], now[mesh] + extra + max(0, working_bytes(instruction) - extra))
                peak[mesh] = max(peak[mesh], now[mesh] + made)
                hold(mesh, outputs)
            case Send(_, peer, message):
                begin = max(start, lanes.get((mesh, peer), 0.0))
                end = begin + message_seconds(mesh, instruction)
                lanes[mesh, peer] = arrived[message] = end
                intervals.append(Interval(mesh, begin, end, instruction))
                if message in receiving:
                    hold(*receiving[message])
            case Recv():
                clock[mesh] = start
            case Free(buffers):
                drop(mesh, buffers)
    seconds = max([0.0, *(i.end for i in intervals)])
    intervals.sort(key=lambda i: (i.start, i.mesh))
    return Simulation(seconds, tuple(intervals), peak, busy)
