"""Planning that can end at any time: with the best plan so far, when the time is up or somebody presses Ctrl-C.

In:     a report of progress, the seconds that planning may take.
Out:    a report that ends a pass; what each pass took, and why planning ended before all was tried.
Method: passes tell of progress before each piece of work, which is where they can end. Without a plan there is nothing to end
        with: the limit waits for the first one, and Ctrl-C ends everything, as it does where nobody sits at a terminal.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from autopar.plan.decision import Search
from autopar.report.show import in_notebook
from autopar.search.progress import Report


class TimeIsUp(Exception):
    """Planning has taken as long as it may, and there is a plan."""


class Anytime:
    """A report that also ends planning; as of `Report`.

    Attributes:
        reason: Why planning ended before all was tried; "": it has not.
        tried: What was tried: (what, its time or why not).
    """

    def __init__(self, report: Report, seconds: float | None):
        self.reason = ""
        self.tried: Sequence[tuple[str, str]] = ()
        self._report, self._limit, self._started = report, seconds or math.inf, time.monotonic()
        self._best = math.inf
        self._passes: list[tuple[str, float]] = []

    @property
    def time_is_up(self) -> str:
        """The reason, if it is the limit."""
        return f"planning_seconds={self._limit:g} were over"

    def __call__(self, text: str, done: float | None = None, best: float = math.inf) -> None:
        """As of `Report`.

        Raises:
            TimeIsUp: It is.
        """
        self._best = min(self._best, best)
        self._report(text, done, best)
        if math.isfinite(self._best) and time.monotonic() - self._started > self._limit:
            raise TimeIsUp

    @contextlib.contextmanager
    def one_pass(self, name: str, has_plan: Callable[[], bool]) -> Iterator[None]:
        """A pass, named for people, which ends early if it must and there is a plan."""
        started = time.process_time()
        try:
            yield
        except TimeIsUp:
            if not has_plan():
                raise AssertionError("a best step was told of, and there is no plan") from None
            self.reason = self.time_is_up
        except KeyboardInterrupt:
            if not (has_plan() and (sys.stderr.isatty() or in_notebook())):
                raise
            self.reason = "it was stopped"
        finally:
            self._passes.append((name, time.process_time() - started))

    def search(self) -> Search:
        """What was tried, for the plan."""
        return Search(tuple(self.tried), tuple(self._passes), self.reason)
