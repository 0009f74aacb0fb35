"""The simulator: times and bytes of small streams by hand, of planned ones by the formulas; timelines and their traces."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import autopar
from autopar.mesh import Achieved
from autopar.mesh.ray_nodes import RayMachine
from autopar.streams.clock import sharing, simulate_streams
from autopar.streams.emit import Emission, emit_instructions
from autopar.streams.instructions import Free, Recv, Run, Send, writes
from autopar.streams.schedules import find_schedule
from autopar.streams.simulate import simulate
from tests.small_mlp import train_step
from tests.sweep import QUICK, SLOW

SECONDS = {"a": 2.0, "b": 3.0, "c": 1.0, "d": 0.0}
"""How long the programs of the streams below run."""


def run(program, inputs=(), outputs=(), microbatch=0, stage=0):
    return Run(program, stage, microbatch, inputs, outputs)


def simulated(streams, num_bytes=(), working=0, message=1.0, resident=None, overwritten=lambda run: ()):
    num_buffers = 1 + max(b for s in streams.values() for i in s for b in _all_buffers(i))
    return simulate(
        streams,
        lambda run: SECONDS[run.program],
        lambda mesh, send: message if isinstance(message, float) else message[send.message],
        num_bytes or [1] * num_buffers,
        lambda run: working if isinstance(working, int) else working[run.program],
        resident,
        overwritten,
    )


def _all_buffers(instruction):
    return (*instruction.inputs, *instruction.outputs) if isinstance(instruction, Run) else instruction.buffers


def spans(simulation):
    """(mesh, what, start, end): a program by its name, a message by its number."""
    return [
        (i.mesh, getattr(i.instruction, "program", None) or i.instruction.message, i.start, i.end)
        for i in simulation.intervals
    ]


# Times.


def test_one_message():
    streams = {
        0: [run("a", (), (0,)), Send((0,), 1, 7), run("b", (0,), (1,)), Free((0, 1))],
        1: [Recv((2,), 0, 7), run("b", (2,), (3,)), Free((2, 3))],
    }
    found = simulated(streams, message=0.5)
    assert spans(found) == [(0, "a", 0, 2), (0, 7, 2, 2.5), (0, "b", 2, 5), (1, "b", 2.5, 5.5)]
    assert found.seconds == 5.5 and found.busy_seconds == {0: 5, 1: 3}


def test_receiving_waits_and_sending_does_not():
    streams = {
        0: [run("a", (), (0,)), Send((0,), 1, 0), run("c", (0,), (1,)), Send((1,), 1, 1), run("c", (1,), (2,))],
        1: [run("b", (), (3,)), Recv((4,), 0, 0), run("c", (4,), (5,)), Recv((6,), 0, 1), run("c", (6,), (7,))],
    }
    quick, slow = simulated(streams, message=0.25), simulated(streams, message=10.0)
    assert [s for s in spans(quick) if s[0] == 1] == [(1, "b", 0, 3), (1, "c", 3, 4), (1, "c", 4, 5)]
    assert [s for s in spans(slow) if s[0] == 1] == [(1, "b", 0, 3), (1, "c", 12, 13), (1, "c", 22, 23)]
    assert quick.busy_seconds == slow.busy_seconds == {0: 4, 1: 5}


def test_messages_between_two_meshes_go_one_after_the_other():
    streams = {
        0: [run("d", (), (0, 1, 2)), Send((0,), 1, 0), Send((1,), 1, 1), Send((2,), 2, 2)],
        1: [Recv((3,), 0, 0), Recv((4,), 0, 1), run("c", (3, 4), (5,)), Send((5,), 0, 3)],
        2: [Recv((6,), 0, 2), run("c", (6,), (7,)), Send((7,), 1, 4)],
    }
    streams[0] += [Recv((8,), 1, 3), run("c", (8,), (9,))]
    streams[1] += [Recv((10,), 2, 4), run("c", (10,), (11,))]
    found = simulated(streams, message={0: 4.0, 1: 3.0, 2: 2.0, 3: 1.0, 4: 1.0})
    messages = {what: (start, end) for _, what, start, end in spans(found) if isinstance(what, int)}
    assert messages == {0: (0, 4), 1: (4, 7), 2: (0, 2), 3: (8, 9), 4: (3, 4)}
    assert found.seconds == 10


def test_received_in_another_order_than_sent():
    streams = {
        0: [run("c", (), (0, 1)), Send((0,), 1, 0), Send((1,), 1, 1)],
        1: [Recv((2,), 0, 1), run("c", (2,), (3,)), Recv((4,), 0, 0), run("c", (4,), (5,))],
    }
    assert [s for s in spans(simulated(streams, message=2.0)) if s[0] == 1] == [(1, "c", 5, 6), (1, "c", 6, 7)]


def test_streams_that_wait_for_each_other():
    streams = {
        0: [Recv((0,), 1, 1), run("a", (0,), (1,)), Send((1,), 1, 0)],
        1: [Recv((2,), 0, 0), run("a", (2,), (3,)), Send((3,), 0, 1)],
    }
    with pytest.raises(AssertionError, match="wait for each other"):
        simulated(streams)


# Bytes.


def test_bytes_by_hand():
    streams = {
        0: [
            run("a", (0,), (1,)),  # 100 + 10
            run("a", (1,), (2,)),  # 100 + 10 + 20
            Free((1,)),
            run("a", (0, 2), (3,)),  # 100 + 20 + 5
            Free((2, 3)),
        ]
    }
    num_bytes = [100, 10, 20, 5]
    assert simulated(streams, num_bytes, resident={0: (0,)}).peak_bytes == {0: 130}
    assert simulated(streams, num_bytes, working={"a": 50}, resident={0: (0,)}).peak_bytes == {0: 170}, (
        "third: 120 + 50"
    )
    assert simulated({0: [run("a", (), (0,))]}, [7]).peak_bytes == {0: 7}
    assert simulated({0: [], 1: [run("a", (), (0,))]}, [7], resident={0: ()}).peak_bytes == {0: 0, 1: 7}


def test_what_is_written_in_place_takes_no_more():
    streams = {0: [run("a", (0,), (1,), 0), Free((0,)), run("a", (1,), (2,), 1), Free((1,)), run("c", (2,), (3,))]}
    num_bytes = [40, 40, 40, 8]
    assert simulated(streams, num_bytes, resident={0: (0,)}).peak_bytes == {0: 80}

    def in_place(run):
        return run.inputs if run.program == "a" else ()

    assert simulated(streams, num_bytes, resident={0: (0,)}, overwritten=in_place).peak_bytes == {0: 48}
    # The sum is there all through the run, beside what the program works with.
    found = simulated(streams, num_bytes, {"a": 5, "c": 0}, resident={0: (0,)}, overwritten=in_place)
    assert found.peak_bytes == {0: 48}
    found = simulated(streams, num_bytes, {"a": 60, "c": 0}, resident={0: (0,)}, overwritten=in_place)
    assert found.peak_bytes == {0: 100}


def test_a_message_takes_room_from_its_sending():
    streams = {
        0: [run("c", (), (0,)), Send((0,), 1, 0), Free((0,)), run("b", (), (1,))],
        1: [run("b", (), (2,)), Free((2,)), Recv((3,), 0, 0), run("c", (3,), (4,)), Free((3, 4))],
    }
    assert simulated(streams, [30, 1, 10, 30, 5]).peak_bytes == {0: 31, 1: 40}
    later = {**streams, 1: [run("c", (), (2,)), Free((2,)), *streams[1][2:]]}
    later[0] = [run("b", (), (1,)), *streams[0][:3]]
    assert simulated(later, [30, 1, 10, 30, 5]).peak_bytes == {0: 31, 1: 35}


def test_what_is_sent_stays_until_it_has_arrived():
    """The second message waits for the first: its sender still has it while it goes on."""
    streams = {
        0: [run("c", (), (0,)), Send((0,), 1, 0), Free((0,)), run("c", (), (1,)), Send((1,), 1, 1), Free((1,))],
        1: [Recv((3,), 0, 0), Free((3,)), Recv((4,), 0, 1), Free((4,))],
    }
    streams[0] += [run("b", (), (2,)), Free((2,))]  # from second 2 on
    num_bytes = [30, 20, 10, 30, 20]
    assert simulated(streams, num_bytes, message=0.0).peak_bytes == {0: 30, 1: 30}
    assert simulated(streams, num_bytes, message=1.0).peak_bytes == {0: 50, 1: 50}, "0 until 2, 1 from 1 on"
    assert simulated(streams, num_bytes, message=1.5).peak_bytes == {0: 60, 1: 50}, "0 until 2.5, 1 until 4"
    assert simulated(streams, num_bytes, message={0: 0.5, 1: 9.0}).peak_bytes == {0: 50, 1: 30}, "0 until 1.5"


def test_what_is_sent_twice_stays_until_both_have_arrived():
    streams = {
        0: [run("c", (), (0,)), Send((0,), 1, 0), Send((0,), 2, 1), Free((0,)), run("c", (), (1,)), run("c", (), (2,))],
        1: [Recv((3,), 0, 0), Free((3,))],
        2: [Recv((4,), 0, 1), Free((4,))],
    }
    num_bytes = [30, 1, 10, 30, 30]
    assert simulated(streams, num_bytes, message={0: 3.0, 1: 0.5}).peak_bytes[0] == 41
    assert simulated(streams, num_bytes, message={0: 0.5, 1: 1.0}).peak_bytes[0] == 31


# Planned pipelines.


@functools.cache
def planned(num_stages, num_microbatches, schedule="1f1b", rows=64):
    array = jax.ShapeDtypeStruct((rows, 72), np.float32)
    return autopar.parallelize(
        train_step,
        cluster=autopar.Cluster(1, num_stages, SLOW, QUICK),
        method=autopar.PipelineParallel(num_stages=num_stages, num_microbatches=num_microbatches, schedule=schedule),
        batch_argnums=(1,),
    ).plan([jax.ShapeDtypeStruct((72, 72), np.float32)] * (2 * num_stages), {"x": array, "y": array})


def under(plan, schedule):
    """The streams of the same stages under another schedule, and their simulation."""
    origin, pipeline = plan.origin, plan.origin.pipeline
    order = find_schedule(schedule).order(len(plan.stages), plan.num_microbatches)
    state = [origin.program.jaxpr.invars[k] for k in origin.roles.state]
    donated = {v for v, d in zip(origin.program.jaxpr.invars, origin.roles.donated, strict=True) if d}
    streams = emit_instructions(Emission(pipeline.tasks, pipeline.stages, order, state, donated))
    return streams, simulate_streams(streams, pipeline.stages, pipeline.first_device, origin.cluster)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("s, m", [(2, 1), (2, 4), (2, 8), (3, 4), (4, 8)])
def test_clocks_of_planned_streams(s, m, schedule):
    streams, _ = under(planned(s, m), schedule)
    found = simulate(
        streams.instructions,
        lambda run: float(run.program.endswith(("/F", "/B"))),
        lambda mesh, send: 0.0,
        [b.value.num_bytes for b in streams.buffers],
        lambda run: 0,
    )
    assert found.seconds == 2 * (m + s - 1)
    assert found.busy_seconds == dict.fromkeys(range(s), 2.0 * m)


def test_peaks_of_schedules():
    plan = planned(2, 8, rows=640)  # activations outweigh the copy of a weight that only the forward pass reads
    one, all_forward = under(plan, "1f1b")[1].peak_bytes, under(plan, "gpipe")[1].peak_bytes
    assert one[0] < all_forward[0] and one[1] < all_forward[1]
    assert plan.cost.peak_bytes == (one[0], one[1])


@pytest.mark.parametrize("schedule, in_flight", [("gpipe", 8), ("1f1b", 2)])
def test_residuals_in_flight(schedule, in_flight):
    plan = planned(2, 8)
    streams, _ = under(plan, schedule)
    backward = plan.origin.pipeline.stages[0].task("B")
    residuals = {b.key: b.num_bytes for b in backward.inputs if b.kind == "loop"}
    from_forward = {b.key for b in plan.origin.pipeline.stages[0].task("F").outputs} & set(residuals)
    assert from_forward
    found = simulate(
        streams.instructions,
        lambda run: 1.0,
        lambda mesh, send: 0.0,
        [b.value.num_bytes * (b.stage == 0 and b.value.key in from_forward) for b in streams.buffers],
        lambda run: 0,
    )
    assert found.peak_bytes[0] == in_flight * sum(residuals[key] for key in from_forward)


def most_alive(stream, given, num_bytes):
    """The most bytes of buffers at once; a received one counts from its `Recv` on."""
    now = most = sum(num_bytes[b] for b in given)
    for instruction in stream:
        now += sum(num_bytes[b] for b in writes(instruction))
        most = max(most, now)
        now -= sum(num_bytes[b] for b in instruction.buffers) if isinstance(instruction, Free) else 0
    return most


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("s, m", [(2, 4), (3, 4), (4, 8)])
def test_peaks_equal_those_of_each_stream_by_itself(s, m, schedule):
    """Under 1F1B a message may wait for its receiver: it is there from when it was sent, which its stream does not tell."""
    streams, _ = under(planned(s, m), schedule)
    num_bytes = [b.value.num_bytes for b in streams.buffers]
    accounted = {
        mesh: most_alive(stream, streams.given[mesh], num_bytes) for mesh, stream in streams.instructions.items()
    }
    found = simulate(
        streams.instructions,
        lambda run: float(run.program.endswith(("/F", "/B"))),
        lambda mesh, send: 0.0,
        num_bytes,
        lambda run: 0,
        streams.given,
    )
    for mesh, stream in streams.instructions.items():
        messages = [sum(num_bytes[b] for b in i.buffers) for i in stream if isinstance(i, Recv)]
        waiting = max(messages) if schedule == "1f1b" and mesh > 0 else 0
        assert accounted[mesh] <= found.peak_bytes[mesh] <= accounted[mesh] + waiting


def test_simulated_step_is_the_plans():
    plan = planned(2, 4)
    simulation = under(plan, "1f1b")[1]
    assert plan.cost.step_seconds == plan.timeline().seconds == simulation.seconds
    assert plan.cost.bubble_seconds > 0
    tasks = [t for stage in plan.origin.pipeline.stages for t in stage.tasks]
    busy = sum(t.seconds * (4 if t.task.kind in "FB" else 1) for t in tasks)
    assert sum(simulation.busy_seconds.values()) == pytest.approx(busy)


# Timelines.


@pytest.mark.parametrize("s, m", [(2, 4), (4, 8)])
def test_timeline(s, m):
    events = planned(s, m).timeline().events
    assert {e.kind for e in events} - {"init"} == {"F", "B", "U", "transfer"}
    assert [e.start for e in events] == sorted(e.start for e in events)
    for stage in range(s):
        for kind in "FB":
            found = [e for e in events if (e.stage, e.kind) == (stage, kind)]
            assert [e.microbatch for e in found] == list(range(m)) and {e.mesh for e in found} == {stage}
    for stage in range(1, s):
        for k in range(m):
            done, begun = (
                next(e for e in events if (e.kind, e.stage, e.microbatch) == ("F", n, k)) for n in (stage - 1, stage)
            )
            assert done.end < begun.start, "a microbatch is sent in between"
    transfers = [e for e in events if e.kind == "transfer"]
    assert {e.microbatch for e in transfers} == set(range(m)) and all(e.start < e.end for e in transfers)


def test_trace(tmp_path):
    timeline = planned(2, 4).timeline()
    trace = json.loads(timeline.json())
    assert trace == json.loads(json.dumps(timeline.trace()))
    names = [e for e in trace["traceEvents"] if e["ph"] == "M"]
    bars = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(names) + len(bars) == len(trace["traceEvents"]) and len(bars) == len(timeline.events)
    assert {e["args"]["name"] for e in names} == {"mesh 0 runs", "mesh 0 sends", "mesh 1 runs", "mesh 1 sends"}
    assert {(e["pid"], e["tid"]) for e in bars} <= {(e["pid"], e["tid"]) for e in names}
    for bar, event in zip(bars, timeline.events, strict=True):
        assert set(bar["args"]) == {"kind", "stage", "microbatch", "mesh"}
        assert bar["args"]["kind"] in {"F", "B", "W", "U", "init", "transfer"}
        assert all(isinstance(bar["args"][name], int) for name in ("stage", "microbatch", "mesh"))
        assert bar["ts"] == pytest.approx(event.start * 1e6) and bar["dur"] == pytest.approx(
            1e6 * (event.end - event.start)
        )
        assert bar["ts"] >= 0 and bar["dur"] >= 0
    for tid in {e["tid"] for e in bars}:
        row = sorted((e["ts"], e["ts"] + e["dur"]) for e in bars if e["tid"] == tid)
        if tid % 2 == 0:
            assert all(a[1] <= b[0] + 1e-6 for a, b in zip(row, row[1:], strict=False)), (
                "a mesh does one thing at a time"
            )
    timeline.save(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == trace


def test_timeline_as_text():
    lines = str(planned(2, 4).timeline()).splitlines()
    assert [line[:8] for line in lines] == ["mesh 0  ", "mesh 1  "]
    assert all(f"{kind}{k}" in line for line in lines for kind in "FB" for k in range(4))


def test_what_precedes_the_microbatches_is_no_update():
    events = planned(2, 4).timeline().events
    assert {e.kind for e in events if e.name.endswith("/init")} == {"init"}
    assert all(
        e.kind != "U" or e.start >= max(f.end for f in events if f.kind in "FB" and f.mesh == e.mesh) for e in events
    )


def test_a_first_stage_has_a_backward_pass_where_backward_is_split():
    events = planned(2, 4, "zb-h1").timeline().events
    assert [e.microbatch for e in events if (e.stage, e.kind) == (0, "B")] == [0, 1, 2, 3]
    assert {e.kind for e in events if e.stage == 1} >= {"B", "W"}


# Cores that meshes share.


def shared(streams, num_cores=2, per_mesh=2):
    """Two meshes of two devices each on a host of four, or as stated."""

    def speeds(running):
        return dict.fromkeys(running, 4 / max(per_mesh * len(running), num_cores))

    num_buffers = 1 + max(b for s in streams.values() for i in s for b in _all_buffers(i))
    return simulate(
        streams,
        lambda run: SECONDS[run.program],
        lambda mesh, send: 1.0,
        [1] * num_buffers,
        lambda run: 0,
        speeds=speeds,
    )


def test_runs_at_once_share_the_cores():
    """Alone twice as fast: a of 2 s and b of 3 s begin together; a ends at 2 s, what is left of b takes half of its 1 s."""
    found = shared({0: [run("a", (), (0,))], 1: [run("b", (), (1,), stage=1)]})
    assert spans(found) == [(0, "a", 0.0, 2.0), (1, "b", 0.0, 2.5)]
    assert found.seconds == 2.5 and found.busy_seconds == {0: 2.0, 1: 2.5}


def test_a_stage_that_waits_leaves_its_cores_to_the_other():
    """One after the other takes no longer than both at once: there is no bubble where the cores are never idle."""
    streams = {
        0: [run("a", (), (0,)), Send((0,), 1, 7), run("c", (0,), (1,))],
        1: [Recv((2,), 0, 7), run("b", (2,), (3,), stage=1)],
    }
    found = shared(streams)
    assert spans(found) == [(0, "a", 0.0, 1.0), (0, 7, 1.0, 1.5), (0, "c", 1.5, 2.5), (1, "b", 1.5, 3.5)]


@pytest.mark.parametrize(("num_cores", "alone", "in_turns", "at_once"), [(8, 1.0, 0.5, 1.0), (2, 2.0, 1.0, 1.0)])
def test_meshes_of_one_process_have_its_cores_in_turns(num_cores, alone, in_turns, at_once):
    """XLA's CPU client runs one program at a time; workers of their own run at once, as far as there are cores."""
    stages = [SimpleNamespace(mesh=autopar.LogicalMesh((4,)))] * 2
    device = autopar.Device("cpu", achieved=Achieved(host_cores=num_cores))
    for machine, both in ((None, in_turns), (RayMachine((), 8, None, 1.0, 1.0, 1.0), at_once)):
        speeds = sharing(stages, (0, 4), autopar.Cluster(1, 8, device, machine=machine))
        assert speeds((0,)) == {0: alone}
        assert speeds((0, 1)) == {0: both, 1: both}


def test_cores_that_copy_a_message_compute_nothing_meanwhile():
    """The message of 1 s and b of 3 s begin together and share the cores: 1 s, and what is left of b half of its 2 s."""
    found = shared({0: [run("d", (), (0,)), Send((0,), 1, 7)], 1: [run("b", (), (1,), stage=1), Recv((2,), 0, 7)]})
    assert [span for span in spans(found) if span[1] != "d"] == [(0, 7, 0.0, 1.0), (1, "b", 0.0, 2.0)]


def test_a_run_that_is_overtaken_slows_down():
    """b runs alone for 1 s at speed 2 (2 of its 3 s), then beside a: 1 more second for the last."""
    streams = {
        0: [run("b", (), (0,))],
        1: [run("c", (), (1,), stage=1), run("a", (1,), (2,), stage=1)],
    }
    found = shared(streams)
    assert spans(found) == [(0, "b", 0.0, 3.0), (1, "c", 0.0, 1.0), (1, "a", 1.0, 3.0)]


@pytest.mark.parametrize("num_cores", [1, 2, 4])
def test_memory_is_the_same_at_any_speed(num_cores):
    streams = {0: [run("a", (), (0,)), run("b", (0,), (1,)), Free((0, 1))]}
    assert shared(streams, num_cores).peak_bytes == simulated(streams).peak_bytes
