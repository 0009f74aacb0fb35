"""A comparison as text and as a page: a bar for each plan, and the table.

In:     rows, sorted.
Out:    text; HTML that needs nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape

from autopar.compare.row import Row
from autopar.markup import WIDTH, box, picture, room_for, tag, text
from autopar.plan.words import bytes_text, seconds_text, share_text
from autopar.report.html import section, table_html, wrapped
from autopar.report.page import Table
from autopar.report.pictures.legend import legend
from autopar.report.pictures.timetable import RIGHT, TOP, clock_axis
from autopar.report.text import wide_text

ROW, BAR = 30, 20
PARTS = (("F", "kernels"), ("all-gather", "exposed communication"), ("wait", "bubbles"))
"""What a step consists of, and the colour's class."""


def table_of(rows: Sequence[Row], currency: str) -> Table:
    """The figures, in words."""
    unit = next((row.unit for row in rows if row.plan is not None), "samples")
    has_price = any(row.price_per_million is not None for row in rows)
    has_watts = any(row.kwh_per_million is not None for row in rows)
    columns = ["cluster", "method", "step", "MFU", f"{unit}/s", "peak", "left", "exposed", "bubbles"]
    columns += [f"{currency or 'price'} per million"] * has_price + ["kWh per million"] * has_watts
    cells = tuple(_cells(row, has_price, has_watts) for row in rows)
    problems = "\n".join(f"{row.cluster}, {row.method}: {row.problem}" for row in rows if row.problem)
    return Table("All figures", tuple(columns), cells, tuple(range(2, len(columns))), problems, (0, 1))


def comparison_text(title: str, rows: Sequence[Row], currency: str) -> str:
    """The table, and below it why there is no plan."""
    table = replace(table_of(rows, currency), title=title)
    return "\n".join(filter(None, [wide_text([table], 240), table.note]))


def comparison_html(title: str, rows: Sequence[Row], currency: str) -> str:
    """The same as a page, with bars."""
    figures = table_html(table_of(rows, currency), is_open=True)  # they are what one asks for
    return wrapped("\n".join([tag("h1", escape(title)), section("Where the time goes", _bars(rows)), figures]))


def _cells(row: Row, has_price: bool, has_watts: bool) -> tuple[str, ...]:
    more = [row.price_per_million] * has_price + [row.kwh_per_million] * has_watts
    if row.plan is None:
        return (row.cluster, row.method, "no plan", *[""] * (6 + len(more)))
    cost = row.plan.cost
    return (
        row.cluster,
        row.method,
        seconds_text(cost.step_seconds),
        share_text(row.mfu),
        f"{row.rate:,.0f}",
        bytes_text(max(cost.peak_bytes)),
        bytes_text(row.left_bytes),
        f"{row.exposed_seconds / cost.step_seconds:.0%}",
        f"{cost.bubble_seconds / cost.step_seconds:.0%}",
        *("?" if value is None else f"{value:.3g}" for value in more),
    )


def _bars(rows: Sequence[Row]) -> str:
    planned = [row for row in rows if row.plan is not None]
    if not planned:
        return tag("p", "There is no plan.")
    names = [f"{row.cluster}, {row.method}" for row in planned]
    left = min(WIDTH / 2, max(map(room_for, names)) + 12)
    end = max(row.step_seconds for row in planned)
    scale = (WIDTH - left - RIGHT) / end
    parts = clock_axis(end, scale, TOP + ROW * len(planned), left)
    for number, (row, name) in enumerate(zip(planned, names, strict=True)):
        x, y = left, TOP + number * ROW
        fits = int((left - 12) / room_for("x"))
        parts.append(text(0, y + 14, name if len(name) <= fits else name[: fits - 1] + "…", "strong"))
        assert row.plan is not None
        bubble = row.plan.cost.bubble_seconds
        for (kind, words), seconds in zip(
            PARTS, (row.step_seconds - row.exposed_seconds - bubble, row.exposed_seconds, bubble), strict=True
        ):
            if seconds > 1e-6 * row.step_seconds:
                parts.append(box(x, y, seconds * scale, BAR, f"k-{kind}", f"{name}, {words}: {seconds_text(seconds)}"))
                x += seconds * scale
    return picture(TOP + ROW * len(planned), *parts, label="Seconds of a step of each plan") + legend(
        (f"k-{kind}", words) for kind, words in PARTS
    )
