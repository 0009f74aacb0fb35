"""Shows timelines: of a simulated step, and of a measured step beside its prediction, part by part.

In:     a timeline; the measurements of `compiled.measure`, each part with its prediction.
Out:    `ShownTimeline`; `MeasuredStep`: a timeline, a table as text and as HTML; the largest differences, as text.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from autopar.markup import tag
from autopar.plan.words import count_text, seconds_text
from autopar.report.html import table_html, wrapped
from autopar.report.page import Page, Table
from autopar.report.pictures.time import lanes_picture
from autopar.report.pictures.timetable import timetable_picture
from autopar.report.text import page_text
from autopar.streams.timeline import Timeline, timetable_text

SAME = 0.1
"""Lanes whose relative difference is smaller are not listed."""


@dataclass(frozen=True, repr=False)
class ShownTimeline(Timeline):
    """A `Timeline` that a notebook shows as a timetable."""

    def _repr_html_(self) -> str:
        return wrapped(timetable_picture(self.events, {}) or "nothing runs")


@dataclass(frozen=True, slots=True)
class Lane:
    """A part of a step, predicted and measured.

    Attributes:
        name: `"step"`, `"kernels"`, `"stage0/F"`, `"all-reduce over x"`, `"mesh 0 to mesh 1"`, ...
        times: Number of runs in a step.
        predicted_seconds: Predicted seconds of all runs together.
        measured_seconds: Measured seconds of all runs together.
    """

    name: str
    times: int
    predicted_seconds: float
    measured_seconds: float

    @property
    def ratio(self) -> float | None:
        """Predicted over measured seconds; None: it was not measured."""
        return self.predicted_seconds / self.measured_seconds if self.measured_seconds > 0 else None


@dataclass(frozen=True, repr=False)
class MeasuredStep(ShownTimeline):
    """A measured step beside its prediction; `compiled.measure(...)` returns it.

    It is a `Timeline` too: for a pipeline, of its programs and messages with their measured times; for a single program, an
    empty one.

    Attributes:
        name: The name of the step.
        step_seconds: Mean time of steps that ran one after another until all results were computed; where a step does not
            return its state, median time of steps on copies of it.
        num_steps: Number of these steps.
        lanes: The step and its parts, each predicted and measured.
        note: How the parts were measured.
    """

    name: str = ""
    step_seconds: float = 0.0
    num_steps: int = 0
    lanes: tuple[Lane, ...] = ()
    note: str = ""

    def __repr__(self) -> str:
        return f"MeasuredStep({self.name}: {seconds_text(self.step_seconds)} a step)"

    def __str__(self) -> str:
        drawing = timetable_text(self.events) if self.events else ""
        return page_text(Page(self.title, (), (self._table(),), drawing))

    @property
    def title(self) -> str:
        """What was measured, as one line."""
        steps = f" over {count_text(self.num_steps, 'step')}" if self.num_steps > 1 else ""
        return f"A step of `{self.name}`: {seconds_text(self.step_seconds)} measured{steps}"

    def _table(self) -> Table:
        return Table("Predicted and measured", _COLUMNS, tuple(map(_row, self.lanes)), (1, 2, 3, 4), self.note)

    def _repr_html_(self) -> str:
        drawing = timetable_picture(self.events, {}) if self.events else ""
        return wrapped(tag("h1", escape(self.title)) + drawing + self.picture() + table_html(self._table()))

    def picture(self) -> str:
        """A picture with two bars for each lane."""
        return lanes_picture([(lane.name, lane.predicted_seconds, lane.measured_seconds) for lane in self.lanes])


_COLUMNS = ("", "times", "predicted", "measured", "predicted / measured")


def _row(lane: Lane) -> tuple[str, ...]:
    ratio = "-" if lane.ratio is None else f"{lane.ratio:.2f}"
    return lane.name, str(lane.times), seconds_text(lane.predicted_seconds), seconds_text(lane.measured_seconds), ratio


def parting_text(measured: MeasuredStep) -> str:
    """The lanes whose prediction and measurement differ by more than a tenth, the largest difference first; "": none."""
    apart = [
        lane
        for lane in measured.lanes
        if abs(lane.predicted_seconds - lane.measured_seconds)
        > SAME * max(lane.predicted_seconds, lane.measured_seconds)
    ]
    apart.sort(key=lambda lane: -abs(lane.predicted_seconds - lane.measured_seconds))
    if not apart:
        return ""
    rows = tuple((*_row(lane), seconds_text(lane.measured_seconds - lane.predicted_seconds)) for lane in apart)
    table = Table("More than a tenth apart", (*_COLUMNS, "more than predicted"), rows, (1, 2, 3, 4, 5), measured.note)
    return page_text(Page(measured.title, (), (table,)))
