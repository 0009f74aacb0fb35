"""The bar of a run: steps, loss, what is done per second, the time left; lines where there is no terminal.

In:     how many steps there are, if that is known; what there is to show after each.
Out:    a line on stderr that is drawn anew; or, where that is asked for and there is no terminal, one every
        `LINE_SECONDS`. Of a run that is done, how it ended.
Method: `rich`. The bar begins with the first step that is done: what is planned before has a line of its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_SECONDS = 10.0
MOST_VALUES = 4
"""How many values are shown."""


class Bar:
    """Owns the bar; shows nothing where it is not wanted."""

    def __init__(self, name: str, total: int | None, wanted: bool | None, console: Console | None = None):
        """Shows nothing yet; `total` steps are not known if None, and `wanted` None is on a terminal, and in a notebook."""
        self._console = console or Console(file=sys.stderr)
        self.is_shown = self._console.is_terminal or self._console.is_jupyter if wanted is None else wanted
        self._name, self._total = name, total
        self._bar: Progress | None = None
        self._begun, self._line = time.monotonic(), 0.0
        self._first = 0

    def go_to(self, number: int) -> None:
        """The run goes on from here."""
        self.pause()
        self._first = number
        self._begun = self._line = time.monotonic()

    def show(self, number: int, values: Mapping[str, float], rate: float, unit: str) -> None:
        """So many steps are done; values of the last, and how much is done per second."""
        if not self.is_shown:
            return
        text = "  ".join([*_most(values), *_rate(rate, unit)])
        if self._console.is_terminal:
            if self._bar is None:
                self._bar = self._started()
            self._bar.update(self._bar.task_ids[0], completed=number, text=text)
        elif time.monotonic() - self._line >= LINE_SECONDS:
            self._line = time.monotonic()
            self._print(f"{self._name}: step {self._of(number)}  {text}{self._left(number)}")

    def note(self, number: int, values: Mapping[str, float]) -> None:
        """A line that stays: what was measured after so many steps."""
        if self.is_shown and values:
            self._print(f"{self._name}: after step {self._of(number)}  {'  '.join(_most(values))}")

    def pause(self) -> None:
        """Take the bar away, until there is something to show."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def stop(self, number: int, values: Mapping[str, float], failed: bool) -> None:
        """The run has ended."""
        self.pause()
        if self.is_shown:
            how = "ended by an error after" if failed else "done:"
            steps = f"step {self._of(number)}, {number - self._first} of them now"
            took = f"in {_duration(time.monotonic() - self._begun)}"
            self._print(f"{self._name}: {how} {steps}, {took}  {'  '.join(_most(values))}".rstrip())

    def _started(self) -> Progress:
        columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        bar = Progress(
            TextColumn("{task.description}"), *columns, TextColumn("{task.fields[text]}"), console=self._console
        )
        bar.add_task(self._name, total=self._total, completed=self._first, text="")
        bar.start()
        return bar

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _of(self, number: int) -> str:
        return str(number) if self._total is None else f"{number} of {self._total}"

    def _left(self, number: int) -> str:
        done = number - self._first
        if self._total is None or not done:
            return ""
        return f"  {_duration((time.monotonic() - self._begun) / done * (self._total - number))} left"


def _most(values: Mapping[str, float]) -> list[str]:
    """The first few values in words, losses before others."""
    names = sorted(values, key=lambda name: "loss" not in name)[:MOST_VALUES]
    return [f"{name} {values[name]:.4g}" for name in names]


def _rate(rate: float, unit: str) -> list[str]:
    return [f"{rate:,.0f} {unit}/s" if rate >= 10 else f"{rate:.2g} {unit}/s"] if rate else []


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = int(seconds) // 60 % 60, int(seconds) // 3600
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {int(seconds) % 60:02} s"
