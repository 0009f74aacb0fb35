"""Shows how far planning is, on a terminal, in a log or in a notebook; and lets Ctrl-C end it.

In:     lines of progress, as the planner goes on: what it does, which part of its work is done, the best step so far.
Out:    a bar that goes away when the plan is there. On what is no terminal, a line every ten seconds.
Method: what is left is told from what is done and the time that took. Work is counted in problems to be solved, which are
        not equally large: the bar is an estimate, and never goes back.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from html import escape
from importlib import import_module
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from autopar.plan.words import seconds_text
from autopar.report.show import in_notebook

LINE_SECONDS = 10.0
"""Between lines on what is no terminal."""
SILENT_SECONDS = 1.0
"""What is planned sooner shows no bar in a notebook."""


class Report(Protocol):
    """Called as planning goes on."""

    def __call__(self, text: str, done: float | None = None, best: float = math.inf) -> None:
        """What is done now; which part of all is done before that, None: unknown; seconds of the best step so far."""
        ...


def silent(text: str, done: float | None = None, best: float = math.inf) -> None:
    """Nobody waits."""


def part_of(report: Report, first: float, last: float) -> Report:
    """A report of a part of the work, which is from `first` to `last` of all."""

    def of_all(text: str, done: float | None = None, best: float = math.inf) -> None:
        report(text, None if done is None else first + (last - first) * done, best)

    return of_all


class Standing:
    """How far planning is; `report` is told as it goes on."""

    def __init__(self, name: str, now: Callable[[], float] = time.monotonic):
        self.name, self.text, self.done, self.best = name, "", 0.0, math.inf
        self._now, self._started = now, now()

    def report(self, text: str, done: float | None = None, best: float = math.inf) -> None:
        """As of `Report`."""
        self.text, self.done, self.best = text, max(self.done, min(done or 0.0, 1.0)), min(self.best, best)

    @property
    def elapsed_seconds(self) -> float:
        """Since planning began."""
        return self._now() - self._started

    def __str__(self) -> str:
        parts = [f"{self.elapsed_seconds:.0f} s"]
        if self.done > 0:
            left = self.elapsed_seconds * (1 - self.done) / self.done
            parts = [f"{self.done:.0%}", *parts, f"about {left:.0f} s left"]
        if math.isfinite(self.best):
            parts.append(f"best step {seconds_text(self.best)}")
        return f"{', '.join(parts)}: {self.text or f'planning {self.name}'}"


@contextlib.contextmanager
def planning_progress(name: str) -> Iterator[Report]:
    """Show how far planning is, as it can be shown here; yields what is to be told of it.

    Raises:
        KeyboardInterrupt: Planning was stopped; where in the planner that was is left out.
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

        def report(text: str, done: float | None = None, best: float = math.inf) -> None:
            standing.report(text, done, best)
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

    def report(text: str, done: float | None = None, best: float = math.inf) -> None:
        standing.report(text, done, best)
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
