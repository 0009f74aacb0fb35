"""Makes the error of a failed worker.

In:     which worker failed and how, the positions of the others, the job's streams.
Out:    `WorkerError`: the worker, its instruction and microbatch, and the workers that wait for it.
Method: a worker that raised reports its instruction itself, and one that makes no progress is asked. For one that died or does
        not answer, the first message that others wait for tells: the worker has not reached the instruction that sends it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.errors import WorkerError
from autopar.runtime.ray.job import Job
from autopar.runtime.ray.seats import Seat
from autopar.runtime.ray.share import Position
from autopar.streams.instructions import Instruction, Recv, Run, Send

RESTART = (
    "restore the state from a checkpoint, or begin anew: the workers of this job have been ended, and the step "
    "starts new ones when it is called."
)
LONGER = "if that takes so long, wait longer: Cluster.ray({option}=...); else "
GOES_ON = "the workers go on: call the step, or fetch another array."


@dataclass(frozen=True, slots=True)
class Failure:
    """How a worker failed.

    Attributes:
        worker: The worker.
        how: Its process ended; it raised; it did not answer; or it answered, but made no progress.
        cause: The exception of Ray or of the worker.
        seconds: How long it did not answer, or made no progress.
        method: The method that was called.
        position: Its position, if it answered.
        subject: What the call was about, as text.
        option: The option of the cluster that limits this time.
    """

    worker: int
    how: Literal["died", "raised", "silent", "stuck"]
    cause: BaseException | None
    seconds: float = 0.0
    method: str = ""
    position: Position | None = None
    subject: str = ""
    option: str = "wait_seconds"


def worker_error(
    failure: Failure, seats: Sequence[Seat], positions: Mapping[int, Position], job: Job | None, goes_on: bool = False
) -> WorkerError:
    """The error for the user. `positions`: of the other workers. `job`: the job; None: the call was about no stream."""
    seat = seats[failure.worker]
    waiting = _waiting(seats, positions, job)
    if isinstance(failure.cause, WorkerError):
        own = failure.cause
        return WorkerError(own.summary, given=_joined(own.given, waiting), wrong=own.wrong, do=RESTART, **own.facts)
    word, place = "before", _place(seat, positions, job)
    if failure.position is not None and job is not None:
        word, place = "at", _at(seat, failure.position, job)
    instruction, microbatch = place if place is not None else (None, -1)
    asked = ""
    if job is None and failure.method:
        of = f" of {failure.subject}" if failure.subject else ""
        asked = f", for which this process waited in `{failure.method}`{of}"
    do = GOES_ON if goes_on else RESTART
    if failure.how == "stuck":
        do = LONGER.format(option=failure.option) + do
    return WorkerError(
        "a worker failed.",
        given=_joined(f"{seat}{asked}" + (f", {word}: {instruction}" if instruction is not None else ""), waiting),
        wrong=f"{_how(failure)}.",
        do=do,
        worker=str(seat),
        stage=instruction.stage if isinstance(instruction, Run) else seat.mesh,
        instruction=None if instruction is None else str(instruction),
        microbatch=microbatch,
    )


def write_error(failure: Failure, seats: Sequence[Seat]) -> Exception:
    """The error for a checkpoint that was not written; `OSError` or `RuntimeError` if the worker raised, else `WorkerError`."""
    seat, cause = seats[failure.worker], failure.cause
    if failure.how == "raised":
        # TensorStore raises ValueError if the operating system refuses a call.
        kind = OSError if isinstance(cause, OSError | ValueError) else RuntimeError
        return kind(f"{seat}: {type(cause).__name__}: {cause}")
    return WorkerError(
        "a worker did not write its part of a checkpoint.",
        given=f"{seat}, for which the driver waited",
        wrong=f"{_how(failure)}.",
        do=(LONGER.format(option="wait_seconds") if failure.how == "stuck" else "")
        + "what was not written is lost if the worker has ended: restore another checkpoint.",
        worker=str(seat),
        stage=seat.mesh,
        waited_for=seat.number,
    )


def _how(failure: Failure) -> str:
    return {
        "died": f"its process has ended: killed, out of memory, or its node is lost ({_first_line(failure.cause)})",
        "raised": f"{type(failure.cause).__name__}: {failure.cause}",
        "silent": f"it does not answer for {failure.seconds:.0f} s: stopped, or stuck",
        "stuck": f"it answers, but does not come on for {failure.seconds:.0f} s: a program, a collective, a message or a "
        f"file does not end (in `{failure.method}`)",
    }[failure.how]


def microbatch_of(instruction: Instruction, job: Job) -> int:
    """The microbatch of an instruction; -1: it has none."""
    match instruction:
        case Run(microbatch=microbatch):
            return microbatch
        case Send(buffers) | Recv(buffers):
            return max((job.streams.buffers[at].microbatch for at in buffers), default=-1)
    return -1


def _at(seat: Seat, position: Position, job: Job) -> tuple[Instruction, int]:
    """The instruction and microbatch at a worker's position; after the last instruction, that one, whose work is waited for."""
    stream = job.streams.instructions[seat.mesh]
    instruction = stream[min(position.at, len(stream) - 1)]
    return instruction, microbatch_of(instruction, job)


def _place(seat: Seat, positions: Mapping[int, Position], job: Job | None) -> tuple[Instruction, int] | None:
    """An instruction that a worker has not passed, since others wait for what it sends; None: unknown."""
    awaited = {p.awaited for p in positions.values() if p.awaited is not None}
    if job is not None:
        for instruction in job.streams.instructions[seat.mesh]:
            if isinstance(instruction, Send) and instruction.message in awaited:
                return instruction, microbatch_of(instruction, job)
    return None


def _waiting(seats: Sequence[Seat], positions: Mapping[int, Position], job: Job | None) -> str:
    found = []
    for number, position in positions.items():
        if job is not None and position.awaited is not None:
            instruction = job.streams.instructions[seats[number].mesh][position.at]
            microbatch = microbatch_of(instruction, job)
            text = f", microbatch {microbatch}" if microbatch >= 0 else ""
            found.append(f"{seats[number]} waits: {instruction}{text}")
        elif (
            job is not None
            and position.seconds > 1.0
            and position.at < len(job.streams.instructions[seats[number].mesh])
        ):
            found.append(f"{seats[number]} stands: {_at(seats[number], position, job)[0]}, {position.seconds:.0f} s")
    return "\n".join(found)


def _joined(*texts: str) -> str:
    return "\n".join(text for text in texts if text)


def _first_line(error: BaseException | None) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
