"""Shows the progress of planning on a terminal, in a log or in a notebook; ends planning with the best plan so far.

In:     lines of progress from the planner: what it does, the fraction of its work done, the best step so far and its gap;
        the seconds that planning may take.
Out:    a progress bar, removed at the end; in logs, a line every ten seconds. A report that can end a pass; the seconds of
        each pass, and why planning ended early.
Method: the time left is extrapolated from the fraction done. Work is counted in problems to solve, which differ in size, so
        that the bar is an estimate; it never goes back. Passes report before each piece of work, and can end there, when the
        time is up or the user presses Ctrl-C. As long as there is no plan, a pass goes on, but none is begun behind it; and
        Ctrl-C aborts, as it always does when not on a terminal or in a notebook.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from html import escape
from importlib import import_module
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from autopar.plan.decision import Search
from autopar.plan.words import seconds_text
from autopar.report.show import in_notebook

LINE_SECONDS = 10.0
"""Interval between lines in logs."""
SILENT_SECONDS = 1.0
"""In notebooks the bar appears only after this time."""


class Report(Protocol):
    """A callback for the progress of planning."""

    def __call__(self, text: str, done: float | None = None, best: float = math.inf, gap: float = math.nan) -> None:
        """Report what is done now, the fraction done before it (None: unknown), seconds of the best step so far, and its gap
        (nan: unknown, or as reported before)."""
        ...


def silent(text: str, done: float | None = None, best: float = math.inf, gap: float = math.nan) -> None:
    """A `Report` that shows nothing."""


def part_of(report: Report, first: float, last: float) -> Report:
    """A report for the part of the work between the fractions `first` and `last` of the whole."""

    def of_all(text: str, done: float | None = None, best: float = math.inf, gap: float = math.nan) -> None:
        report(text, None if done is None else first + (last - first) * done, best, gap)

    return of_all


class Standing:
    """The state of planning's progress, updated by `report`."""

    def __init__(self, name: str, now: Callable[[], float] = time.monotonic):
        self.name, self.text, self.done, self.best, self.gap = name, "", 0.0, math.inf, math.nan
        self._now, self._started = now, now()

    def report(self, text: str, done: float | None = None, best: float = math.inf, gap: float = math.nan) -> None:
        """Update, as in `Report`."""
        self.text, self.done = text, max(self.done, min(done or 0.0, 1.0))
        if best < self.best:
            self.best, self.gap = best, gap

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since planning began."""
        return self._now() - self._started

    def __str__(self) -> str:
        parts = [f"{self.elapsed_seconds:.0f} s"]
        if self.done > 0:
            left = self.elapsed_seconds * (1 - self.done) / self.done
            parts = [f"{self.done:.0%}", *parts, f"about {left:.0f} s left"]
        if math.isfinite(self.best):
            parts.append(f"best step {seconds_text(self.best)}")
            parts += [f"gap {self.gap:.2%}"] if math.isfinite(self.gap) else []
        return f"{', '.join(parts)}: {self.text or f'planning {self.name}'}"


@contextlib.contextmanager
def planning_progress(name: str) -> Iterator[Report]:
    """Context that shows the progress of planning; yields the `Report` to call.

    Raises `KeyboardInterrupt`: planning was stopped; without the planner's traceback.
    """
    standing = Standing(name)
    console = Console(file=sys.stderr, force_jupyter=False)
    show = _in_notebook if in_notebook() else _on_terminal if console.is_terminal else _in_log
    try:
        with show(standing, console) as report:
            yield report
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"planning `{name}` was stopped: there is no plan, and nothing has run") from None


@contextlib.contextmanager
def _on_terminal(standing: Standing, console: Console) -> Iterator[Report]:
    bar = Progress(BarColumn(24), TextColumn("{task.description}"), console=console, transient=True)
    with bar:
        task = bar.add_task(f"planning {standing.name}", total=None)

        def report(text: str, done: float | None = None, best: float = math.inf, gap: float = math.nan) -> None:
            standing.report(text, done, best, gap)
            total = 1.0 if standing.done else None
            bar.update(task, description=str(standing), total=total, completed=standing.done)

        yield report


@contextlib.contextmanager
def _in_log(standing: Standing, console: Console) -> Iterator[Report]:
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(LINE_SECONDS):
            print(f"planning {standing.name}: {standing}", file=sys.stderr, flush=True)

    teller = threading.Thread(target=tell, name="planning progress", daemon=True)
    teller.start()
    try:
        yield standing.report
    finally:
        ended.set()
        teller.join()


@contextlib.contextmanager
def _in_notebook(standing: Standing, console: Console) -> Iterator[Report]:
    shown: list[Any] = []
    notebook = import_module("IPython.display")

    def report(text: str, done: float | None = None, best: float = math.inf, gap: float = math.nan) -> None:
        standing.report(text, done, best, gap)
        if standing.elapsed_seconds < SILENT_SECONDS:
            return
        value = f' value="{standing.done:.3f}"' if standing.done else ""
        page = notebook.HTML(f'<progress max="1"{value}></progress> <span>{escape(str(standing))}</span>')
        if shown:
            shown[0].update(page)
        else:
            shown.append(notebook.display(page, display_id=True))

    try:
        yield report
    finally:
        for handle in shown:
            handle.update(notebook.HTML(""))


class TimeIsUp(Exception):
    """The time limit of planning is reached, and there is a plan."""


class Anytime:
    """A `Report` that also ends planning.

    Attributes:
        reason: Why planning ended early; "": it did not.
        ends: When planning is to end, by `time.monotonic()`.
        tried: What was tried: (what, its seconds or why not).
    """

    def __init__(self, report: Report, seconds: float | None):
        self.reason = ""
        self.ends = time.monotonic() + (seconds or math.inf)
        self.tried: Sequence[tuple[str, str]] = ()
        self._report, self._limit = report, seconds or math.inf
        self._best = math.inf
        self._passes: list[tuple[str, float]] = []

    @property
    def time_is_up(self) -> str:
        """The reason that is given for the time limit."""
        return f"planning_seconds={self._limit:g} were over"

    def __call__(self, text: str, done: float | None = None, best: float = math.inf, gap: float = math.nan) -> None:
        """Pass on progress, as in `Report`. Raises `TimeIsUp`: the limit is reached, and there is a plan."""
        self._best = min(self._best, best)
        self._report(text, done, best, gap)
        if math.isfinite(self._best) and time.monotonic() >= self.ends:
            raise TimeIsUp

    @contextlib.contextmanager
    def one_pass(self, name: str, has_plan: Callable[[], bool]) -> Iterator[None]:
        """Context of a named pass, which may end early once there is a plan."""
        started = time.process_time()
        try:
            yield
        except TimeIsUp:
            self.reason = self.time_is_up
        except KeyboardInterrupt:
            if not (has_plan() and (sys.stderr.isatty() or in_notebook())):
                raise
            self.reason = "it was stopped"
        else:
            if not has_plan() and time.monotonic() >= self.ends:
                self.reason = self.time_is_up
        finally:
            self._passes.append((name, time.process_time() - started))

    def search(self) -> Search:
        """The record of the search, for the plan."""
        return Search(tuple(self.tried), tuple(self._passes), self.reason)
