"""Predicted beside measured: two bars for each part of a step.

In:     parts with both times.
Out:    a picture.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.markup import WIDTH, box, picture, room_for, text
from autopar.plan.words import seconds_text
from autopar.report.pictures.legend import legend
from autopar.report.pictures.timetable import TOP, clock_axis

ROW, BAR, RIGHT, LONGEST_NAME = 34, 12, 90, 320


def lanes_picture(lanes: Sequence[tuple[str, float, float]]) -> str:
    """The bars: (name, predicted seconds, measured seconds) of each part."""
    end = max((max(predicted, measured) for _, predicted, measured in lanes), default=0.0)
    if not end:
        return ""
    left = min(LONGEST_NAME, max(room_for(name) for name, _, _ in lanes)) + 10
    scale, height = (WIDTH - left - RIGHT) / end, TOP + ROW * len(lanes)
    parts = clock_axis(end, scale, height, left)
    for row, (name, predicted, measured) in enumerate(lanes):
        y = TOP + row * ROW
        parts.append(text(0, y + 15, name, "strong"))
        for offset, seconds, which, colour in (
            (0, predicted, "predicted", "k-F"),
            (BAR + 1, measured, "measured", "k-B"),
        ):
            tip = f"{name}: {seconds_text(seconds)} {which}"
            parts.append(box(left, y + offset, seconds * scale, BAR, colour, tip))
            parts.append(text(left + seconds * scale + 4, y + offset + 10, seconds_text(seconds), "small soft"))
    colours = legend((("k-F", "predicted"), ("k-B", "measured")))
    return picture(height, *parts, label="A step, predicted and measured") + colours
