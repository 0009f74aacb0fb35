"""Ends planning with the best plan so far, when its time is up or the user presses Ctrl-C.

In:     a progress report, the seconds that planning may take.
Out:    a report that can end a pass; the seconds of each pass, and why planning ended early.
Method: passes report before each piece of work, and can end there. As long as there is no plan, the limit does not apply,
        and Ctrl-C aborts, as it always does when not on a terminal or in a notebook.
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
    """The time limit of planning is reached, and there is a plan."""


class Anytime:
    """A `Report` that also ends planning.

    Attributes:
        reason: Why planning ended early; "": it did not.
        tried: What was tried: (what, its seconds or why not).
    """

    def __init__(self, report: Report, seconds: float | None):
        self.reason = ""
        self.tried: Sequence[tuple[str, str]] = ()
        self._report, self._limit, self._started = report, seconds or math.inf, time.monotonic()
        self._best = math.inf
        self._passes: list[tuple[str, float]] = []

    @property
    def time_is_up(self) -> str:
        """The reason that is given for the time limit."""
        return f"planning_seconds={self._limit:g} were over"

    def __call__(self, text: str, done: float | None = None, best: float = math.inf) -> None:
        """Pass on progress, as in `Report`.

        Raises:
            TimeIsUp: The limit is reached, and there is a plan.
        """
        self._best = min(self._best, best)
        self._report(text, done, best)
        if math.isfinite(self._best) and time.monotonic() - self._started > self._limit:
            raise TimeIsUp

    @contextlib.contextmanager
    def one_pass(self, name: str, has_plan: Callable[[], bool]) -> Iterator[None]:
        """Context of a named pass, which may end early once there is a plan."""
        started = time.process_time()
        try:
            yield
        except TimeIsUp:
            if not has_plan():
                raise AssertionError("a best step was reported, and there is no plan") from None
            self.reason = self.time_is_up
        except KeyboardInterrupt:
            if not (has_plan() and (sys.stderr.isatty() or in_notebook())):
                raise
            self.reason = "it was stopped"
        finally:
            self._passes.append((name, time.process_time() - started))

    def search(self) -> Search:
        """The record of the search, for the plan."""
        return Search(tuple(self.tried), tuple(self._passes), self.reason)
