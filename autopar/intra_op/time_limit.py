"""Limits the time of solvers, shared by all problems that one plan takes.

In:     seconds; how often the plan is used; when planning is to end.
Out:    `TimeLimit`, which all solves draw on; `Work`, the clock that it uses.
Method: only the ILP solver's time counts: what message passing does depends on the size of a problem alone, so that unless
        a solver runs out of time the same input always has the same plan. Processor time is measured, since wall-clock time
        varies with the load of the machine. For the same reason, whether work repays is decided by estimates from sizes of
        tables, not by measured time.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator

from autopar.options import repays
from autopar.tuning import TUNING


class Work:
    """Measures processor time since its creation, in this process and in child processes that it has waited for.

    Other threads are counted, too, but never more seconds than have passed.

    Attributes:
        begun: When that was, by `time.monotonic()`.
    """

    def __init__(self) -> None:
        self.begun, self._worked = time.monotonic(), _processor_seconds()

    @property
    def seconds(self) -> float:
        """Seconds of work so far."""
        return min(time.monotonic() - self.begun, _processor_seconds() - self._worked)


def _processor_seconds() -> float:
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


class TimeLimit:
    """A shared budget of seconds for solvers.

    Attributes:
        seconds: The whole budget.
        left: Seconds left.
        steps: Number of training steps that gain from a better plan; work that does not repay over them is not begun.
        ends: When planning is to end, by `time.monotonic()`: then nothing is begun that can be left out.
    """

    LEAST = 0.05
    """Fraction of the budget below which it counts as spent; a solver that has to run anyway gets this much."""

    def __init__(self, seconds: float, steps: float = math.inf, ends: float = math.inf):
        self.seconds = self.left = seconds
        self.steps, self.ends = steps, ends

    def repays(self, won_seconds: float, work_seconds: float) -> bool:
        """As in `options.repays`; nothing does once planning is to end."""
        return not self.is_over and repays(self.steps, won_seconds, work_seconds)

    def worth(self, won_seconds: float) -> float:
        """Seconds that one solve may take, by its estimate, for what it wins in each step.

        Where all work repays: those of a usual training, or a part of the budget, which has to do for other solves, too.
        """
        if self.steps < math.inf:
            return self.steps * won_seconds
        return max(TUNING.asked_part * self.seconds, TUNING.repaying_steps * won_seconds)

    @property
    def is_over(self) -> bool:
        """Whether planning is to end."""
        return time.monotonic() >= self.ends

    @property
    def is_spent(self) -> bool:
        """Whether too little is left to start a solver."""
        return self.left < self.LEAST * self.seconds or self.is_over

    @contextlib.contextmanager
    def thorough(self, is_asked: bool = True) -> Iterator[None]:
        """Context in which all work repays, if that `is_asked` for."""
        steps, self.steps = self.steps, math.inf if is_asked else self.steps
        try:
            yield
        finally:
            self.steps = steps

    @contextlib.contextmanager
    def running(self) -> Iterator[float]:
        """Context in which a solver runs; yields its time limit, and charges its work."""
        work = Work()
        try:
            yield max(min(self.left, self.ends - work.begun), self.LEAST * self.seconds)
        finally:
            self.left -= work.seconds

    @contextlib.contextmanager
    def half(self) -> Iterator[None]:
        """Context with half of the time: the other half is for another way."""
        kept, ends, now = self.left / 2, self.ends, time.monotonic()
        self.left, self.ends = kept, ends if ends == math.inf else min(ends, (now + ends) / 2)
        try:
            yield
        finally:
            self.left, self.ends = self.left + kept, ends


def time_limit(seconds: float | TimeLimit) -> TimeLimit:
    """A new limit of so many seconds, or the shared one given."""
    return seconds if isinstance(seconds, TimeLimit) else TimeLimit(seconds)
