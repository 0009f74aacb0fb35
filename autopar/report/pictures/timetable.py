"""Draws the pipeline's timetable: a row per mesh with its runs, and its transfers below them.

In:     the events of a step, simulated or measured.
Out:    a picture; the tooltip of a run says what it is, how long it takes, and what it waited for.
Method: a run that starts later than the one before it ends has waited, for the message that arrives when it starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from autopar.markup import FONT, KIND_NAMES, WIDTH, box, kinds_legend, line, picture, room_for, tag, text, ticks
from autopar.plan.words import seconds_text
from autopar.streams.timeline import Event

LEFT, RIGHT, TOP = 92, 14, 24
ROW, RUN, SEND = 40, 24, 5
Arrivals = Mapping[tuple[int, float], int]
"""(receiving mesh, when a message arrives) -> its sender."""


def timetable_picture(events: Sequence[Event], places: Mapping[int, str], seconds: float = 0.0) -> str:
    """The picture; `places`: each mesh's devices, as text; `seconds`: the length of the axis; 0: that of the step."""
    meshes = sorted({e.mesh for e in events})
    end = max((e.end for e in events), default=0.0)
    if not meshes or not end:
        return ""
    scale = (WIDTH - LEFT - RIGHT) / max(seconds, end)
    height = TOP + ROW * len(meshes) + 4
    many = any(e.stage >= len(meshes) for e in events)
    arrivals = {(int(e.name.rsplit(" ", 1)[-1]), e.end): e.mesh for e in events if _is_message(e)}
    parts = clock_axis(max(seconds, end), scale, height)
    for row, mesh in enumerate(meshes):
        y = TOP + row * ROW
        own = [e for e in events if e.mesh == mesh]
        parts.append(text(0, y + 15, f"mesh {mesh}", "strong"))
        parts.append(text(0, y + 29, places.get(mesh, ""), "small soft"))
        parts.append(box(LEFT, y, end * scale, RUN, "k-wait"))
        before = 0.0
        for e in sorted((e for e in own if e.kind != "transfer"), key=lambda e: e.start):
            parts.append(_run(e, y, scale, _tip(e, before, arrivals, many), e.stage >= len(meshes)))
            before = e.end
        parts += [_send(e, y + RUN + 2, scale) for e in own if e.kind == "transfer"]
    kinds = kinds_legend([*(e.kind for e in events), "wait"])
    chart = picture(height, *parts, label="The step on a clock, a row per mesh")
    note = "Numbers are microbatches." + (" Paler runs are of a mesh's later stages." if many else "")
    return chart + kinds + tag("p", escape(note), class_="soft")


def clock_axis(seconds: float, scale: float, height: float, left: float = LEFT) -> list[str]:
    """The time labels above a picture, and the lines through it."""
    found = []
    for time in ticks(seconds):
        x, words = left + time * scale, seconds_text(time)
        if x + room_for(words) / 2 <= WIDTH:
            found += [line(x, TOP - 6, x, height, "grid"), text(x, 12, words, "small soft", "middle")]
    return found


def _is_message(e: Event) -> bool:
    return e.kind == "transfer" and e.name.rsplit(" ", 1)[-1].isdecimal()


def _run(e: Event, y: float, scale: float, tip: str, is_pale: bool) -> str:
    x, width = LEFT + e.start * scale, (e.end - e.start) * scale
    label = str(e.microbatch) if e.kind in ("F", "B", "W") else ""
    drawn = box(x, y, width, RUN, f"k-{e.kind}" + (" pale" if is_pale else ""), tip, rx=1.5)
    fits = label and width > room_for(label, FONT) + 2
    return drawn + (text(x + width / 2, y + 16, label, f"on k-{e.kind}", "middle") if fits else "")


def _tip(e: Event, before: float, arrivals: Arrivals, many: bool) -> str:
    what = KIND_NAMES[e.kind] + (f" of microbatch {e.microbatch}" if e.kind in ("F", "B", "W") else "")
    tip = f"{what}, stage {e.stage}{f' on mesh {e.mesh}' if many else ''}\n{seconds_text(e.end - e.start)}, "
    tip += f"from {seconds_text(e.start)} to {seconds_text(e.end)}"
    if e.start <= before:
        return tip
    sender = arrivals.get((e.mesh, e.start))
    return f"{tip}\nwaited {seconds_text(e.start - before)}" + ("" if sender is None else f" for mesh {sender}")


def _send(e: Event, y: float, scale: float) -> str:
    tip = f"sending {e.name}, {seconds_text(e.end - e.start)}, from {seconds_text(e.start)} to {seconds_text(e.end)}"
    return box(LEFT + e.start * scale, y, (e.end - e.start) * scale, SEND, "k-transfer", tip)
