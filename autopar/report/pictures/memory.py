"""Draws the memory of one device over a step, against the budget, and what it consists of at its peak.

In:     a plan's profile and budget.
Out:    for each mesh a curve, and beside it the parts of its peak.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from autopar.markup import box, line, picture, room_for, tag, text, ticks
from autopar.plan.decision import Decision
from autopar.plan.profile import Memory
from autopar.plan.words import bytes_text, seconds_text

WIDE, HIGH, LEFT, TOP, BOTTOM = 560, 150, 70, 14, 22
MAX_MESHES = 8
"""The most meshes shown: the fullest."""
NEAR_BUDGET = 4.0
"""A budget over so many times the peak is not drawn, since the curve would be flat."""


def memory_pictures(plan: Decision, most_bytes: float = 0.0) -> str:
    """The pictures of all meshes, in order; `most_bytes`: the height of the axis; 0: the highest peak."""
    meshes = [m for m in plan.profile.memory if m.curve]
    shown = sorted(sorted(meshes, key=lambda m: -_peak(m))[:MAX_MESHES], key=lambda m: m.mesh)
    if not shown:
        return ""
    colours = _colours(shown)
    most = max(most_bytes, *(_peak(m) for m in shown))
    rows = [tag("div", _curve(plan, m, most), _parts(m, colours), class_="memory") for m in shown]
    if len(shown) < len(meshes):
        rows.append(tag("p", f"and {len(meshes) - len(shown)} meshes that hold less", class_="soft"))
    return "".join(rows)


def peak_bytes(plan: Decision) -> float:
    """The highest peak of all curves."""
    return max((_peak(m) for m in plan.profile.memory if m.curve), default=0.0)


def _peak(memory: Memory) -> int:
    return max(size for _, size in memory.curve)


def _colours(meshes: Sequence[Memory]) -> dict[str, str]:
    """A colour for each part: a fixed one for parts that every plan has, the others by name for arguments."""
    names = sorted({name for m in meshes for name, _ in m.peak})
    others = [name for name in names if name not in _COLOURS]
    return {name: _COLOURS.get(name) or f"c{_FREE[others.index(name) % len(_FREE)]}" for name in names}


_COLOURS = {
    "kept for the backward pass": "c0",
    "activations of microbatches": "c0",
    "inside the task that runs": "c1",
    "inside a loop": "c1",
    "made once per step": "c2",
    "gradients": "c4",
    "gradients, added up": "c4",
    "the update": "c7",
    "other values": "c8",
}
_FREE = (3, 5, 6, 7, 2)


def _curve(plan: Decision, memory: Memory, most: float) -> str:
    peak, budget = _peak(memory), plan.budget_bytes
    is_near = math.isfinite(budget) and budget <= NEAR_BUDGET * most
    top = max(most, budget if is_near else 0.0) * 1.04
    end = max(plan.cost.step_seconds, memory.curve[-1][0]) if memory.unit == "seconds" else memory.curve[-1][0] + 1
    across, up = (WIDE - LEFT - 8) / (end or 1.0), (HIGH - TOP - BOTTOM) / (top or 1.0)
    floor = HIGH - BOTTOM
    parts = []
    for size in ticks(top, 3):
        y = floor - size * up
        parts += [line(LEFT, y, WIDE - 8, y, "grid"), text(LEFT - 6, y + 4, bytes_text(size), "small soft", "end")]
    path = [f"M{LEFT:g} {floor:g}"]
    for when, size in memory.curve:
        path.append(f"H{LEFT + when * across:.1f}V{floor - size * up:.1f}")
    path.append(f"H{LEFT + end * across:.1f}V{floor:g}Z")
    parts.append(tag("path", d="".join(path), class_="area"))
    at = max(memory.curve, key=lambda point: point[1])[0]
    x, y = LEFT + at * across, floor - peak * up
    where = f"after {seconds_text(at)}" if memory.unit == "seconds" else f"at operation {at:.0f}"
    parts.append(tag("circle", tag("title", escape(f"{bytes_text(peak)} {where}")), cx=x, cy=y, r=3.5, class_="mark"))
    if is_near:
        y = floor - budget * up
        parts += [line(LEFT, y, WIDE - 8, y, "budget")]
        parts += [text(WIDE - 10, y + 13, f"budget {bytes_text(budget)}", "small budget", "end")]
    parts += _below(memory, end, across)
    share = f", {peak / budget:.0%} of {bytes_text(budget)}" if math.isfinite(budget) else ""
    name = f"Mesh {memory.mesh}" if len(plan.profile.memory) > 1 else "Each device"
    title = tag("h3", escape(f"{name}: {bytes_text(peak)} at the peak{share}"))
    return tag("div", title, picture(HIGH, *parts, label=f"{name}: memory over the step", width=WIDE))


def _below(memory: Memory, end: float, across: float) -> Iterator[str]:
    """The labels of the axis: times, or a note that it counts operations."""
    if memory.unit == "operations":
        yield text(LEFT, HIGH - 6, "operations of the program, in order", "small soft")
        return
    for time in ticks(end, 5):
        words, x = seconds_text(time), LEFT + time * across
        if x + room_for(words) / 2 < WIDE:
            yield text(x, HIGH - 6, words, "small soft", "middle")


def _parts(memory: Memory, colours: dict[str, str]) -> str:
    """The peak as a bar, and a table of its parts."""
    total, width, x, bar = sum(size for _, size in memory.peak) or 1, 330.0, 0.0, []
    for name, size in memory.peak:
        bar.append(box(x, 0, width * size / total, 14, colours[name], f"{name}: {bytes_text(size)}"))
        x += width * size / total
    rows = (
        tag(
            "tr",
            tag("td", tag("i", class_=f"swatch {colours[name]}"), escape(name)),
            tag("td", bytes_text(size), class_="number"),
            tag("td", f"{size / total:.0%}", class_="number soft"),
        )
        for name, size in memory.peak
    )
    chart = picture(14, *bar, label="What the peak consists of", width=width)
    return tag("div", chart, tag("table", *rows), class_="parts")
