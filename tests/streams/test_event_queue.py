"""The simulator's queue of events against a clock that looks at every mesh each time."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.streams import simulate as simulating
from autopar.streams.instructions import Free, Recv, Run, Send
from autopar.streams.schedules import find_schedule
from autopar.streams.simulate import simulate


def pipeline_streams(num_stages, num_microbatches, schedule="1f1b"):
    """Forward and backward runs, with a message at every border; buffers are let go of where they are not needed again."""
    streams, message, buffer = {stage: [] for stage in range(num_stages)}, {}, {}
    for kind in "FB":
        for k in range(num_microbatches):
            for stage in range(num_stages):
                buffer[kind, k, stage] = len(buffer)
                message[kind, k, stage] = len(message)
    for stage, steps in enumerate(find_schedule(schedule).order(num_stages, num_microbatches)):
        for step in steps:
            kind, k, out = step.kind, step.microbatch, streams[stage]
            before, after = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
            if 0 <= before < num_stages:
                out.append(Recv((buffer[kind, k, before],), before, message[kind, k, before]))
            out.append(Run(f"{kind}{stage}", stage, k, (), (buffer[kind, k, stage],)))
            if 0 <= after < num_stages:
                out.append(Send((buffer[kind, k, stage],), after, message[kind, k, stage]))
            if kind == "B":
                out.append(Free((buffer["F", k, stage], buffer["B", k, stage])))
    return streams, len(buffer)


def looked_at_each_time(streams, run_seconds, message_seconds):
    """Start and end of every run and message: of all instructions that can begin, the earliest, again and again."""
    at, clock = dict.fromkeys(streams, 0), dict.fromkeys(streams, 0.0)
    arrived, lanes, found = {}, {}, []
    for _ in range(sum(map(len, streams.values()))):
        ready = []
        for mesh, stream in streams.items():
            if at[mesh] < len(stream):
                i = stream[at[mesh]]
                if not isinstance(i, Recv):
                    ready.append((clock[mesh], mesh))
                elif i.message in arrived:
                    ready.append((max(clock[mesh], arrived[i.message]), mesh))
        time, mesh = min(ready)
        i, at[mesh] = streams[mesh][at[mesh]], at[mesh] + 1
        if isinstance(i, Run):
            clock[mesh] = time + run_seconds(i)
            found.append((mesh, time, clock[mesh], i))
        elif isinstance(i, Send):
            begin = max(time, lanes.get((mesh, i.peer), 0.0))
            lanes[mesh, i.peer] = arrived[i.message] = begin + message_seconds(mesh, i)
            found.append((mesh, begin, arrived[i.message], i))
        elif isinstance(i, Recv):
            clock[mesh] = time
    return sorted(found, key=lambda entry: (entry[1], entry[0]))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("seed", range(3))
def test_events_come_in_the_order_of_time(schedule, seed):
    random = np.random.default_rng(seed)
    streams, num_buffers = pipeline_streams(4, 6, schedule)
    lengths = {f"{kind}{stage}": float(random.integers(1, 9)) for kind in "FB" for stage in range(4)}
    delays = random.integers(0, 5, num_buffers).astype(float)
    seconds, message = lambda run: lengths[run.program], lambda mesh, send: delays[send.message]
    found = simulate(streams, seconds, message, [1] * num_buffers, lambda run: 0)
    assert [(i.mesh, i.start, i.end, i.instruction) for i in found.intervals] == looked_at_each_time(
        streams, seconds, message
    )


def test_every_instruction_is_looked_at_at_most_twice(monkeypatch):
    """A step takes time as its instructions are many: once when its turn comes, and once more if it waits for a message."""
    calls, real = [], simulating._Simulator.enqueue
    monkeypatch.setattr(simulating._Simulator, "enqueue", lambda self, mesh: (calls.append(mesh), real(self, mesh)))
    streams, num_buffers = pipeline_streams(16, 12)
    simulate(streams, lambda run: 1.0, lambda mesh, send: 0.5, [1] * num_buffers, lambda run: 0)
    assert len(calls) <= 2 * sum(map(len, streams.values())) + len(streams)


def test_streams_that_wait_for_each_other():
    streams = {0: [Recv((0,), 1, 0), Send((1,), 1, 1)], 1: [Recv((1,), 0, 1), Send((0,), 0, 0)]}
    with pytest.raises(AssertionError, match="wait for each other"):
        simulate(streams, lambda run: 1.0, lambda mesh, send: 1.0, [1, 1], lambda run: 0)


def test_memory_waits_for_the_message_that_takes_it():
    """A buffer that is let go of while it is sent is there until it has arrived; a later run sees it gone."""
    streams = {
        0: [Run("a", 0, 0, (), (0,)), Send((0,), 1, 0), Free((0,)), Run("b", 0, 0, (), (1,)), Run("c", 0, 0, (), (2,))],
        1: [Recv((0,), 0, 0)],
    }
    seconds = {"a": 1.0, "b": 1.0, "c": 1.0}
    slow = simulate(streams, lambda r: seconds[r.program], lambda m, s: 5.0, [4, 2, 1], lambda r: 0)
    quick = simulate(streams, lambda r: seconds[r.program], lambda m, s: 0.5, [4, 2, 1], lambda r: 0)
    assert slow.peak_bytes[0] == 7 and quick.peak_bytes[0] == 6
