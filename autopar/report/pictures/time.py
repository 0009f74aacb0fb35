"""Where a step's time goes: a bar per mesh, of compute by kind, communication by kind, and waiting.

In:     a plan.
Out:    a picture.
Method: compute is the profile's, communication what the plan's collectives take that no kernel hides; what is left of the
        step is waiting. What is hidden is a thin bar below. What a pipeline sends goes on beside these and is in the
        timetable.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.cost import collective_seconds
from autopar.markup import FONT, WIDTH, box, picture, room_for, tag, text
from autopar.plan.decision import Decision
from autopar.plan.words import seconds_text
from autopar.report.pictures.legend import KIND_NAMES, kinds_legend
from autopar.report.pictures.timetable import LEFT, RIGHT, TOP, clock_axis

ROW, BAR, THIN = 34, 22, 4


@dataclass(frozen=True, slots=True)
class Bar:
    """A mesh's step: seconds by kind, in drawing order, together the step; and those hidden behind kernels."""

    name: str
    seconds: dict[str, float]
    hidden: dict[str, float]


def time_bars(plan: Decision) -> list[Bar]:
    """Each mesh's step, taken apart."""
    meshes: dict[object, list[int]] = {}
    for number, stage in enumerate(plan.stages):
        meshes.setdefault(stage.submesh, []).append(number)
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
    """The bars; `seconds` is the length of the axis, 0: of the step."""
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
