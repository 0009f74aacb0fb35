"""Converts the times that workers measured in one step to one clock.

In:     when instructions began and ended, on the clocks of their hosts; a function that reads a host's clock.
Out:    when programs ran and messages were in flight, on the driver's clock.
Method: Cristian's algorithm: a remote clock's reading is assumed to be from the middle between question and answer, with an
        error of at most half the time between them; of several tries the quickest counts. Workers of one host share its
        clock and one offset, so times between them are exact.

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
    """Seconds that a clock (`ask`) is ahead of this one (`now`), and the error bound."""
    best = 0.0, float("inf")
    for _ in range(TRIES):
        before, there, after = now(), ask(), now()
        if (after - before) / 2 < best[1]:
            best = there - (before + after) / 2, (after - before) / 2
    return best


def spans_of(
    job: Job, seats: Sequence[Seat], reports: Mapping[int, Report], offsets: Mapping[int, tuple[float, float]]
) -> tuple[dict[tuple[MeshId, int], Span], dict[int, Span]]:
    """The workers' reports on one clock; of several workers of a mesh, the earliest begin and the latest end count.

    Args:
        job: The job.
        seats: The workers.
        reports: By worker.
        offsets: By host, as of `clock_offset`.

    Returns:
        Begin and end of each program, by (mesh, position in its stream), and of each message, from sending to arrival, by
        number; in seconds.
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
                    # With NCCL the time of arrival is only known as the end of the receive.
                    when = report.arrivals.get(message, end + ahead) - ahead
                    come[message] = max(when, come.get(message, when))
    return runs, {m: (begin, max(begin, come[m])) for m, begin in sent.items() if m in come}
