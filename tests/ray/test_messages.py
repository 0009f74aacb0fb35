"""What the user reads when a worker fails; no Ray needed."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

from autopar.errors import AutoparError, WorkerError
from autopar.runtime.ray.driver.faults import Failure, microbatch_of, worker_error
from autopar.runtime.ray.seats import seats_of
from autopar.runtime.ray.share import Position
from autopar.streams.instructions import Free, Recv, Run, Send

SEATS = seats_of(((0, 2), (2, 2)), 4)
INSTRUCTIONS = {
    0: (Run("stage0/F", 0, 1, (0,), (1,)), Send((1,), 1, 7), Free((1,))),
    1: (Recv((2,), 0, 7), Run("stage1/F", 1, 1, (2,), (3,)), Free((2, 3))),
}
BUFFERS = [SimpleNamespace(microbatch=k) for k in (-1, 1, 1, 1)]
JOB = SimpleNamespace(streams=SimpleNamespace(instructions=INSTRUCTIONS, buffers=BUFFERS))
WAITING = {1: Position(0, 7)}


def test_died():
    cause = RuntimeError("The actor died unexpectedly before finishing this task.\n  more")
    error = worker_error(Failure(0, "died", cause), SEATS, WAITING, JOB)
    assert str(error) == (
        "a worker failed.\n"
        "  given:  worker 0 (mesh 0, host 0), before: send b1 -> mesh 1\n"
        "          worker 1 (mesh 1, host 0) waits: receive b2 <- mesh 0, microbatch 1\n"
        "  wrong:  its process has ended: killed, out of memory, or its node is lost (The actor died unexpectedly before "
        "finishing this task.).\n"
        "  do:     restore the state from a checkpoint, or begin anew: the workers of this job have been ended, and the "
        "step starts new ones when it is called."
    )
    assert (error.worker, error.stage, error.instruction) == ("worker 0 (mesh 0, host 0)", 0, "send b1 -> mesh 1")
    assert error.microbatch == 1 and error.waited_for is None and isinstance(error, AutoparError)


def test_stuck():
    """It answers: it is known where it stands, and the others are told too."""
    failure = Failure(0, "stuck", None, 303.2, "run", Position(1, None, 303.2))
    error = worker_error(failure, SEATS, {1: Position(1, None, 301.0)}, JOB)
    assert str(error) == (
        "a worker failed.\n"
        "  given:  worker 0 (mesh 0, host 0), at: send b1 -> mesh 1\n"
        "          worker 1 (mesh 1, host 0) stands: run stage1/F (stage 1, microbatch 1), 301 s\n"
        "  wrong:  it answers, but does not come on for 303 s: a program, a collective, a message or a file does not end (in "
        "`run`).\n"
        "  do:     if that takes so long, wait longer: Cluster.ray(wait_seconds=...); else restore the state from a "
        "checkpoint, or begin anew: the workers of this job have been ended, and the step starts new ones when it is called."
    )
    assert error.instruction == "send b1 -> mesh 1" and error.microbatch == 1
    failure = Failure(0, "stuck", None, 120.0, "open", Position(0, None, 120.0), option="start_seconds")
    at_start = worker_error(failure, SEATS, {}, None)
    assert "(in `open`)" in str(at_start) and "start_seconds=" in str(at_start) and at_start.instruction is None


def test_hung_outside_of_a_step():
    """There is no instruction: who waited, and for what, is told all the same."""
    error = worker_error(Failure(1, "silent", None, 10.0, "fetch", subject="float32[8,4]"), SEATS, {}, None)
    assert "given:  worker 1 (mesh 1, host 0), for which this process waited in `fetch` of float32[8,4]\n" in str(error)


def test_silent_when_no_one_waits():
    error = worker_error(Failure(1, "silent", None, 10.0), SEATS, {0: Position(2, None)}, JOB)
    assert "given:  worker 1 (mesh 1, host 0)\n" in str(error) and "does not answer for 10 s" in str(error)
    assert error.instruction is None and error.microbatch == -1 and error.stage == 1


def test_raised_by_a_worker_that_says_where():
    facts = {"worker": "w", "stage": 1, "instruction": "i", "microbatch": 1, "waited_for": 0}
    own = WorkerError("a worker failed.", given="w, step 3: i", wrong="it waited.", **facts)
    error = worker_error(Failure(1, "raised", pickle.loads(pickle.dumps(own))), SEATS, {}, JOB)
    assert "given:  w, step 3: i\n" in str(error) and error.waited_for == 0 and "do:" in str(error)


def test_raised_outside_of_a_step():
    error = worker_error(Failure(1, "raised", MemoryError("no room")), SEATS, {}, None)
    assert "MemoryError: no room" in str(error) and error.instruction is None


def test_microbatch_of_instructions():
    assert [microbatch_of(i, JOB) for stream in INSTRUCTIONS.values() for i in stream] == [1, 1, -1, 1, 1, -1]
