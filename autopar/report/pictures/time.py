"""Where a step's time goes: a bar per mesh, of compute by kind, communication by kind, and waiting.

In:     a plan.
Out:    a picture.
Method: compute is the profile's, communication that of the plan's collectives on their meshes; what is left of the step is
        waiting. What a pipeline sends goes on beside these and is in the timetable.
"""

from __future__ import annotations

from autopar.cost import collective_seconds
from autopar.plan.decision import Decision
from autopar.plan.words import seconds_text
from autopar.report.pictures.legend import KIND_NAMES, kinds_legend
from autopar.report.svg import FONT, WIDTH, box, line, picture, room_for, text, ticks

LEFT, RIGHT, TOP, ROW, BAR = 92, 14, 24, 34, 22


def time_bars(plan: Decision) -> list[tuple[str, dict[str, float]]]:
    """(name of a mesh, seconds by kind) of each mesh, kinds in drawing order."""
    meshes: dict[object, list[int]] = {}
    for number, stage in enumerate(plan.stages):
        meshes.setdefault(stage.submesh, []).append(number)
    found = []
    for stages in meshes.values():
        seconds = dict.fromkeys(KIND_NAMES, 0.0)
        for work in plan.profile.work:
            if work.stage in stages:
                seconds[work.kind] += work.seconds
        for c in plan.cost.collectives:
            if c.stage in stages:
                mesh = plan.stages[c.stage].logical_mesh
                seconds[c.kind] += c.times * collective_seconds(c.kind, c.bytes, c.axes, mesh)
        seconds["wait"] = max(0.0, plan.cost.step_seconds - sum(seconds.values()))
        name = "all devices" if len(meshes) == 1 else f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
        found.append((name, {kind: time for kind, time in seconds.items() if time > 1e-6 * plan.cost.step_seconds}))
    return found


def time_picture(plan: Decision, seconds: float = 0.0) -> str:
    """The bars; `seconds` is the length of the axis, 0: of the step."""
    bars, end = time_bars(plan), max(seconds, plan.cost.step_seconds)
    if not end or not plan.profile.work:
        return ""
    scale, height = (WIDTH - LEFT - RIGHT) / end, TOP + ROW * len(bars)
    parts = []
    for time in ticks(end):
        x, words = LEFT + time * scale, seconds_text(time)
        if x + room_for(words) / 2 <= WIDTH:
            parts += [line(x, TOP - 6, x, height, "grid"), text(x, 12, words, "small soft", "middle")]
    for row, (name, times) in enumerate(bars):
        x, y = float(LEFT), TOP + row * ROW
        parts.append(text(0, y + 15, name, "strong"))
        for kind, time in times.items():
            width, share = time * scale, f"{time / plan.cost.step_seconds:.0%}"
            tip = f"{name}, {KIND_NAMES[kind]}: {seconds_text(time)}, {share} of the step"
            parts.append(box(x, y, width, BAR, f"k-{kind}", tip))
            if width > room_for(share, FONT) + 4:
                parts.append(text(x + width / 2, y + 15, share, f"on k-{kind}", "middle"))
            x += width
    return picture(height, *parts, label="Where the time of a step goes") + kinds_legend(
        kind for _, times in bars for kind in times
    )
