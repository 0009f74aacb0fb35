"""Puts the times that workers measured of one step on one clock.

In:     when instructions began and ended by the clocks of their hosts; what a host's clock showed, asked when.
Out:    when programs ran and messages were under way, by the driver's clock.
Method: Cristian's: a clock that is asked shows the middle of question and answer, give or take half of the time between
        them; of several tries the quickest counts. Workers of one host share its clock, and so one offset: between them
        nothing is lost.

F. Cristian, "Probabilistic clock synchronization", Distributed Computing 3, 1989.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autopar.runtime.ray.job import Job
from autopar.runtime.ray.seats import Seat
from autopar.runtime.ray.share import Report
from autopar.streams.instructions import MeshId, Recv, Run, Send

TRIES = 5
Span = tuple[float, float]


def clock_offset(ask: Callable[[], float], now: Callable[[], float]) -> tuple[float, float]:
    """How much a clock (`ask`) is ahead of this one (`now`), and how far off that may be."""
    best = 0.0, float("inf")
    for _ in range(TRIES):
        before, there, after = now(), ask(), now()
        if (after - before) / 2 < best[1]:
            best = there - (before + after) / 2, (after - before) / 2
    return best


def spans_of(
    job: Job, seats: Sequence[Seat], reports: Mapping[int, Report], offsets: Mapping[int, tuple[float, float]]
) -> tuple[dict[tuple[MeshId, int], Span], dict[int, Span]]:
    """What workers report, on one clock; of several workers of a mesh, the first to begin and the last to end.

    Reports are by worker, offsets by host. Returns when each program began and ended, by (mesh, position in its
    stream), and when each message was sent and had come, by number, in seconds.
    """
    runs: dict[tuple[MeshId, int], Span] = {}
    sent: dict[int, float] = {}
    come: dict[int, float] = {}
    for seat in seats:
        report, (ahead, _) = reports[seat.number], offsets[seat.host]
        for at, (begin, end) in report.spans.items():
            begin, end = begin - ahead, end - ahead
            match job.streams.instructions[seat.mesh][at]:
                case Run():
                    other = runs.get((seat.mesh, at), (begin, end))
                    runs[seat.mesh, at] = min(begin, other[0]), max(end, other[1])
                case Send(message=message):
                    sent[message] = min(begin, sent.get(message, begin))
                case Recv(message=message):
                    # Between GPUs nothing tells when it came but that the receiver has it.
                    when = report.arrivals.get(message, end + ahead) - ahead
                    come[message] = max(when, come.get(message, when))
    return runs, {m: (begin, max(begin, come[m])) for m, begin in sent.items() if m in come}
