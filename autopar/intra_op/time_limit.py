"""How long solvers may work on one question, however many problems it takes.

In:     seconds; how often the answer is used.
Out:    `TimeLimit`, which all solves of that question draw on; `Work`, the clock that it goes by.
Method: only the ILP solver's own time counts: what message passing takes depends on the size of a problem alone, so that
        where no solver runs out of time the same question always has the same answer. It is the processor's time, for on a
        busy machine that of the clock is another one each time. So it is with work that is not worth what it can win: it is
        counted, in tables and pairs.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator

from autopar.options import repays


class Work:
    """How long something works: from when this is made, on the processor, in this process and those that it has waited for.

    Where other threads work beside it, they are counted too, but never more seconds than have passed.
    """

    def __init__(self) -> None:
        self._begun = time.monotonic(), _processor_seconds()

    @property
    def seconds(self) -> float:
        """So far."""
        passed, worked = self._begun
        return min(time.monotonic() - passed, _processor_seconds() - worked)


def _processor_seconds() -> float:
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


class TimeLimit:
    """Seconds that solvers may work, in all.

    Attributes:
        seconds: At the beginning.
        left: Of them, now.
        steps: How often what is won is won: more work than that is worth is not begun.
    """

    LEAST = 0.05
    """Part of the limit: with less left, no solver is begun; one that must be gets so much."""

    def __init__(self, seconds: float, steps: float = math.inf):
        self.seconds = self.left = seconds
        self.steps = steps

    def repays(self, won_seconds: float, work_seconds: float) -> bool:
        """As `options.repays`."""
        return repays(self.steps, won_seconds, work_seconds)

    @property
    def is_spent(self) -> bool:
        """Whether too little is left to begin."""
        return self.left < self.LEAST * self.seconds

    @contextlib.contextmanager
    def thorough(self) -> Iterator[None]:
        """While work is done whatever it wins."""
        steps, self.steps = self.steps, math.inf
        try:
            yield
        finally:
            self.steps = steps

    @contextlib.contextmanager
    def running(self) -> Iterator[float]:
        """While a solver works; hands out its time limit."""
        work = Work()
        try:
            yield max(self.left, self.LEAST * self.seconds)
        finally:
            self.left -= work.seconds


def time_limit(seconds: float | TimeLimit) -> TimeLimit:
    """A limit of its own, or the one that is shared."""
    return seconds if isinstance(seconds, TimeLimit) else TimeLimit(seconds)
