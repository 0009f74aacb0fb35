"""Draws where a step's time goes: a bar per mesh with compute, communication and waiting; or two bars for each part of it,
predicted and measured.

In:     a plan; or parts with both times.
Out:    a picture.
Method: compute is from the profile, communication is the exposed time of the plan's collectives, and the rest of the step is
        waiting. Hidden communication is a thin bar below. Transfers between stages are only in the timetable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.cost import collective_seconds
from autopar.grouping import grouped
from autopar.markup import FONT, KIND_NAMES, WIDTH, box, kinds_legend, legend, picture, room_for, tag, text
from autopar.plan.decision import Decision
from autopar.plan.words import seconds_text
from autopar.report.pictures.timetable import LEFT, RIGHT, TOP, clock_axis

ROW, BAR, THIN = 34, 22, 4
LANE, BEHIND, LONGEST_NAME = 12, 90, 320


@dataclass(frozen=True, slots=True)
class Bar:
    """The step of one mesh: seconds by kind, in drawing order, which add up to the step; and hidden seconds by kind."""

    name: str
    seconds: dict[str, float]
    hidden: dict[str, float]


def time_bars(plan: Decision) -> list[Bar]:
    """The bar of each mesh."""
    meshes = grouped((stage.submesh, number) for number, stage in enumerate(plan.stages))
    step, found = plan.cost.step_seconds, []
    for stages in meshes.values():
        seconds, hidden = dict.fromkeys(KIND_NAMES, 0.0), dict.fromkeys(KIND_NAMES, 0.0)
        for work in plan.profile.work:
            if work.stage in stages:
                seconds[work.kind] += work.seconds
        for c, exposed in zip(plan.cost.collectives, plan.cost.exposed_seconds, strict=True):
            if c.stage in stages:
                mesh = plan.stages[c.stage].logical_mesh
                seconds[c.kind] += exposed
                hidden[c.kind] += max(0.0, c.times * collective_seconds(c.kind, c.bytes, c.axes, mesh) - exposed)
        seconds["wait"] = max(0.0, step - sum(seconds.values()))
        name = "all devices" if len(meshes) == 1 else f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
        found.append(Bar(name, *({k: t for k, t in of.items() if t > 1e-6 * step} for of in (seconds, hidden))))
    return found


def time_picture(plan: Decision, seconds: float = 0.0) -> str:
    """The picture of all bars; `seconds`: the length of the axis; 0: that of the step."""
    bars, end = time_bars(plan), max(seconds, plan.cost.step_seconds)
    if not end or not plan.profile.work:
        return ""
    scale, height = (WIDTH - LEFT - RIGHT) / end, TOP + ROW * len(bars)
    parts = clock_axis(end, scale, height)
    for row, bar in enumerate(bars):
        y = TOP + row * ROW
        parts.append(text(0, y + 15, bar.name, "strong"))
        parts += _segments(bar.name, bar.seconds, y, BAR, scale, plan.cost.step_seconds, "")
        parts += _segments(
            bar.name, bar.hidden, y + BAR + 1, THIN, scale, plan.cost.step_seconds, " hidden behind compute"
        )
    kinds = kinds_legend(kind for bar in bars for kind in (*bar.seconds, *bar.hidden))
    note = "Thin bars are hidden behind compute." if any(bar.hidden for bar in bars) else ""
    return picture(height, *parts, label="Where the time of a step goes") + kinds + tag("p", note, class_="soft")


def _segments(
    name: str, seconds: dict[str, float], y: float, height: float, scale: float, step: float, how: str
) -> Iterator[str]:
    x = float(LEFT)
    for kind, time in seconds.items():
        width, share = time * scale, f"{time / step:.0%}"
        words = KIND_NAMES[kind]
        yield box(x, y, width, height, f"k-{kind}", f"{name}, {words}{how}: {seconds_text(time)}, {share} of the step")
        if height == BAR and width > room_for(share, FONT) + 4:
            yield text(x + width / 2, y + 15, share, f"on k-{kind}", "middle")
        x += width


def lanes_picture(lanes: Sequence[tuple[str, float, float]]) -> str:
    """The picture of parts, given as (name, predicted seconds, measured seconds)."""
    end = max((max(predicted, measured) for _, predicted, measured in lanes), default=0.0)
    if not end:
        return ""
    left = min(LONGEST_NAME, max(room_for(name) for name, _, _ in lanes)) + 10
    scale, height = (WIDTH - left - BEHIND) / end, TOP + ROW * len(lanes)
    parts = clock_axis(end, scale, height, left)
    for row, (name, predicted, measured) in enumerate(lanes):
        y = TOP + row * ROW
        parts.append(text(0, y + 15, name, "strong"))
        for offset, seconds, which, colour in (
            (0, predicted, "predicted", "k-F"),
            (LANE + 1, measured, "measured", "k-B"),
        ):
            tip = f"{name}: {seconds_text(seconds)} {which}"
            parts.append(box(left, y + offset, seconds * scale, LANE, colour, tip))
            parts.append(text(left + seconds * scale + 4, y + offset + 10, seconds_text(seconds), "small soft"))
    colours = legend((("k-F", "predicted"), ("k-B", "measured")))
    return picture(height, *parts, label="A step, predicted and measured") + colours
