"""A timeline that shows itself in a notebook.

In:     `Timeline`, simulated or measured.
Out:    the same, with its timetable as HTML.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.report.html import wrapped
from autopar.report.pictures.timetable import timetable_picture
from autopar.streams.timeline import Timeline


@dataclass(frozen=True, repr=False)
class ShownTimeline(Timeline):
    """A `Timeline`, for people."""

    def _repr_html_(self) -> str:
        return wrapped(timetable_picture(self.events, {}) or "nothing runs")
