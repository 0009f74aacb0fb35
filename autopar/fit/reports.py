"""Reports the progress of a run: calls the loggers, and draws the bar.

In:     each batch when its step is dispatched, each step's metrics when they have arrived, and the results of evaluations.
Out:    calls of the loggers, each with all values of one number of steps; a progress bar on stderr, or, if wanted without a
        terminal, a line every `LINE_SECONDS`; a last line about how the run ended.
Method: rates are samples or tokens since the last call, over the time since then without checkpoints and eval steps. A row is
        held until the next, so that an evaluation after the same step is in it. The bar, of `rich`, starts with the first
        step that is done, since planning before it has a bar of its own.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from autopar.fit.state import scalars_of
from autopar.loggers import Logger
from autopar.search.figures import amount_of


class Reports:
    """Reports a run; owns the bar and the values not reported yet."""

    def __init__(self, loggers: Sequence[Logger], log_every: int, bar: Bar):
        self._loggers, self._every, self._bar = loggers, log_every, bar
        self._amounts: dict[int, tuple[int, str]] = {}
        self._row: tuple[int, dict[str, float]] | None = None
        self._metrics: Any = None
        self._unit = "samples"
        self._done, self._told, self._clock = 0, 0, _Clock()

    def resumed(self, number: int) -> None:
        """Continue from a number of steps done."""
        self._row, self._metrics, self._done, self._told = None, None, number, number
        self._amounts.clear()
        self._clock = _Clock()
        for logger in self._loggers:
            if hasattr(logger, "resume"):
                logger.resume(number)
        self._bar.go_to(number)

    def dispatched(self, number: int, batch: Any) -> None:
        """Step `number` has been dispatched with this batch."""
        if self._bar.is_shown or self._loggers:
            self._amounts[number] = amount_of(batch)

    def came(self, number: int, metrics: Any) -> None:
        """The metrics of step `number` have arrived."""
        self._done = number + 1
        if not self._bar.is_shown and not self._loggers:
            return
        amount, unit = self._amounts.pop(number, (0, "samples"))
        self._clock.count(amount)
        self._metrics, self._unit = metrics, unit
        if self._bar.is_shown:
            self._bar.show(self._done, scalars_of(metrics), self._clock.rate(), unit)
        if self._done % self._every == 0:
            self._tell_step()

    def measured(self, values: dict[str, float]) -> None:
        """Report the result of an evaluation after the steps that are done."""
        named = {f"eval/{name}": value for name, value in values.items()}
        self._tell(named)
        self._bar.note(self._done, named)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """A context whose time does not count as steps' time."""
        with self._clock.stopped():
            yield

    def ended(self, failed: bool = False) -> None:
        """Report what has not been reported, and the end of the run."""
        if not failed and self._told < self._done:
            self._tell_step()
        self._flush()
        for logger in self._loggers:
            if hasattr(logger, "close"):
                logger.close()
        self._bar.stop(self._done, scalars_of(self._metrics), failed)

    def paused(self) -> None:
        """Hide the bar for a while, for that of planning."""
        self._bar.pause()

    def _tell_step(self) -> None:
        self._told = self._done
        self._tell({**scalars_of(self._metrics), **self._clock.since_last(self._unit)})

    def _tell(self, values: dict[str, float]) -> None:
        if self._row is not None and self._row[0] == self._done:
            self._row[1].update(values)
            return
        self._flush()
        self._row = self._done, dict(values)

    def _flush(self) -> None:
        row, self._row = self._row, None
        if row is not None:
            for logger in self._loggers:
                logger(*row)


class _Clock:
    """Counts steps and amounts over time, since the start and since the last question; starts after the first step."""

    def __init__(self) -> None:
        self._begun: float | None = None
        self._mark = (0.0, 0, 0)
        self._steps, self._amount = 0, 0

    def count(self, amount: int) -> None:
        """Count a step; the first, which includes planning and compilation, only starts the clock."""
        if self._begun is None:
            self._begun = time.monotonic()
            self._mark = self._begun, 0, 0
            return
        self._steps += 1
        self._amount += amount

    def rate(self) -> float:
        """The amount per second since the start."""
        return 0.0 if self._begun is None else self._amount / max(time.monotonic() - self._begun, 1e-9)

    def since_last(self, unit: str) -> dict[str, float]:
        """Seconds per step, and amount per second, since the last call; {} if no step was counted."""
        if self._begun is None or self._steps == self._mark[1]:
            return {}
        now = time.monotonic()
        seconds, steps, amount = now - self._mark[0], self._steps - self._mark[1], self._amount - self._mark[2]
        self._mark = now, self._steps, self._amount
        found = {"step_seconds": seconds / steps}
        return found | ({f"{unit}_per_second": amount / max(seconds, 1e-9)} if amount else {})

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """A context whose time does not count."""
        begun = time.monotonic()
        yield
        if self._begun is not None:
            left_out = time.monotonic() - begun
            self._begun += left_out
            self._mark = self._mark[0] + left_out, self._mark[1], self._mark[2]


LINE_SECONDS = 10.0
MOST_VALUES = 4
"""The most values shown."""


class Bar:
    """The progress bar, or lines without a terminal; shows nothing if that is not wanted."""

    def __init__(self, name: str, total: int | None, wanted: bool | None, console: Console | None = None):
        """Shows nothing yet. `total`: number of steps, if known. `wanted`: None: on a terminal or in a notebook."""
        self._console = console or Console(file=sys.stderr)
        self.is_shown = self._console.is_terminal or self._console.is_jupyter if wanted is None else wanted
        self._name, self._total = name, total
        self._bar: Progress | None = None
        self._begun, self._line = time.monotonic(), 0.0
        self._first = 0

    def go_to(self, number: int) -> None:
        """Continue from a number of steps done."""
        self.pause()
        self._first = number
        self._begun = self._line = time.monotonic()

    def show(self, number: int, values: Mapping[str, float], rate: float, unit: str) -> None:
        """Show the number of steps done, the values of the last one, and the amount per second."""
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
        """Print a permanent line: values after so many steps."""
        if self.is_shown and values:
            self._print(f"{self._name}: after step {self._of(number)}  {'  '.join(_most(values))}")

    def pause(self) -> None:
        """Remove the bar, until the next `show`."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def stop(self, number: int, values: Mapping[str, float], failed: bool) -> None:
        """Remove the bar, and print how the run ended."""
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
    """The first few values as text, losses first."""
    names = sorted(values, key=lambda name: "loss" not in name)[:MOST_VALUES]
    return [f"{name} {values[name]:.4g}" for name in names]


def _rate(rate: float, unit: str) -> list[str]:
    return [f"{rate:,.0f} {unit}/s" if rate >= 10 else f"{rate:.2g} {unit}/s"] if rate else []


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = int(seconds) // 60 % 60, int(seconds) // 3600
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {int(seconds) % 60:02} s"
