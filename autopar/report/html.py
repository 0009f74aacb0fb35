"""A plan as one page of HTML: pictures, then the tables of its text; or two, beside each other.

In:     `Decision`, or two, of one program or of two; or one and a measured timeline of it.
Out:    a piece for a notebook (`plan_html`), or a whole file (`whole_file`); neither needs anything else, and
        both can be printed.
Method: each picture is a file of `pictures/`; a picture that has nothing to show is left out. Of two plans
        the same pictures are drawn one above the other, on the same scales, so that lengths can be compared; what differs in
        words is `diff.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from autopar.markup import grid, tag
from autopar.plan.decision import Decision
from autopar.plan.words import bytes_text, count_text, local_bytes, seconds_text, type_text
from autopar.report.diff import diff_tables
from autopar.report.measured import MeasuredStep
from autopar.report.page import Table, page_of
from autopar.report.paths import collapse_paths
from autopar.report.pictures.memory import memory_pictures, peak_bytes
from autopar.report.pictures.model import model_picture
from autopar.report.pictures.tensors import device_grid, tensor_table
from autopar.report.pictures.time import time_picture
from autopar.report.pictures.timetable import timetable_picture
from autopar.report.style import SCRIPT, STYLE
from autopar.streams.timeline import Timeline


def plan_html(plan: Decision) -> str:
    """The page of a plan, as a piece of HTML."""
    page = page_of(plan)
    facts = tag("table", *(tag("tr", tag("th", escape(n)), tag("td", escape(t))) for n, t in page.facts))
    tables = "\n".join(table_html(table) for table in page.tables)
    body = [
        tag("h1", escape(page.title)),
        tag("p", escape(", ".join(filter(None, (plan.method, plan.machine)))), class_="soft"),
        tag("div", *_cards(plan), class_="cards"),
        *_pictures(plan),
        tag("section", tag("h2", "In words"), facts, tables),
    ]
    return wrapped("\n".join(body))


def wrapped(body: str) -> str:
    """A page's body with its style and script."""
    return f'{STYLE}\n<div class="autopar-plan">\n{body}\n</div>\n{SCRIPT}'


def whole_file(title: str, body: str) -> str:
    """A whole HTML file of a page."""
    head = (
        '<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>'
    )
    return f'{head}\n<body class="autopar">\n{body}\n</body>\n</html>\n'


def _cards(plan: Decision) -> Iterator[str]:
    """The figures that one asks for first."""
    cost = plan.cost
    step = cost.step_seconds or math.inf
    yield _card(seconds_text(cost.step_seconds), "a step, predicted")
    yield _card(f"{cost.compute_seconds / step:.0%}", "of it computing")
    if cost.communication_seconds:
        hidden = cost.communication_seconds > 1.001 * cost.exposed_communication_seconds
        words = "of it waiting for collectives" if hidden else "of it in collectives"
        yield _card(f"{cost.exposed_communication_seconds / step:.0%}", words)
    if not plan.is_one_program:
        yield _card(f"{cost.bubble_seconds / step:.0%}", "of it without work")
    most = max(cost.peak_bytes)
    budget = f" of {bytes_text(plan.budget_bytes)}" if math.isfinite(plan.budget_bytes) else ""
    yield _card(bytes_text(most), f"at the peak{budget}, each device")
    yield _card(str(sum(s.num_devices for s in {s.submesh for s in plan.stages})), _shape(plan))


def _shape(plan: Decision) -> str:
    stages = f"{count_text(len(plan.stages), 'stage')}, {plan.schedule}" if not plan.is_one_program else str(plan.mesh)
    return f"devices, {stages}"


def _card(figure: str, words: str) -> str:
    return tag("div", tag("b", escape(figure)), tag("span", escape(words), class_="soft"), class_="card")


def _pictures(plan: Decision) -> Iterator[str]:
    for title, picture in (
        ("Where the time goes", time_picture(plan)),
        ("The pipeline's timetable", timetable_picture(plan.events.events, device_places(plan))),
        ("Memory over the step", memory_pictures(plan)),
        ("The model, and where it is cut" if len(plan.stages) > 1 else "The model", model_picture(plan)),
        ("How each tensor lies", tensor_table(plan)),
    ):
        if picture:
            yield section(title, picture)


def section(title: str, picture: str) -> str:
    """A picture under its title."""
    return tag("section", tag("h2", escape(title)), picture)


def device_places(plan: Decision) -> dict[int, str]:
    """Per mesh, its devices in words."""
    found = {}
    for mesh, submesh in enumerate(dict.fromkeys(stage.submesh for stage in plan.stages)):
        found[mesh] = f"device{'s' * (submesh.num_devices > 1)} {submesh}"
    return found


def table_html(table: Table, is_open: bool = False) -> str:
    """A table that opens, or `is_open` already."""
    kinds = [
        "number" if k in table.numbers else "code name" if k in table.names else "code"
        for k in range(len(table.columns))
    ]
    head, *rows = (
        tag("tr", *(tag(name, escape(cell), class_=kind) for cell, kind in zip(row, kinds, strict=True)))
        for name, row in (("th", table.columns), *(("td", row) for row in table.rows))
    )
    title = tag("summary", escape(table.title), f" ({count_text(len(rows), 'row')})")
    body = tag("div", grid(head, rows), class_="wide")
    note = tag("p", escape(table.note)) if table.note else ""
    return tag("details", title, body, note, open="" if is_open else None)


MAX_ROWS = 200


def pair_title(this: Decision, other: Decision) -> str:
    """What the page is called."""
    names = f"`{this.name}`" if this.name == other.name else f"`{this.name}` and `{other.name}`"
    return f"Two plans of {names}"


def pair_html(this: Decision, other: Decision) -> str:
    """Two plans as a piece of HTML."""
    plans = (this, other)
    seconds = max(plan.cost.step_seconds for plan in plans)
    most = max(map(peak_bytes, plans))
    body = [tag("h1", escape(pair_title(this, other))), tag("p", _ratio(this, other), class_="soft")]
    for title, pictures in (
        ("Where the time goes", [time_picture(plan, seconds) for plan in plans]),
        ("Timetables", [timetable_picture(plan.events.events, device_places(plan), seconds) for plan in plans]),
        ("Memory over the step", [memory_pictures(plan, most) for plan in plans]),
    ):
        if any(pictures):
            body.append(section(title, _both(plans, pictures)))
    moved = [*_moved(this, other)]
    if moved:
        head = tag("tr", *(tag("th", words) for words in ("path", "this", "", "other", "")))
        table = grid(head, moved[:MAX_ROWS], "tensors")
        body.append(section("What lies otherwise", tag("div", table, class_="wide")))
    tables = [table_html(table) for table in diff_tables(this, other) if table.rows]
    body.append(section("In words", "".join(tables) or tag("p", "nothing differs")))
    return wrapped("\n".join(body))


def _ratio(this: Decision, other: Decision) -> str:
    a, b = this.cost.step_seconds, other.cost.step_seconds
    faster = f": {max(a, b) / min(a, b):.2f} times as long" if min(a, b) > 0 and a != b else ""
    return escape(f"{seconds_text(a)} a step by {this.method}, {seconds_text(b)} by {other.method}{faster}")


def _both(plans: tuple[Decision, Decision], pictures: list[str]) -> str:
    parts = []
    for name, plan, picture in zip(("this", "other"), plans, pictures, strict=True):
        shown = picture or tag("p", "one mesh: no pipeline", class_="soft")
        parts += [tag("h3", escape(f"{name}: {plan.method}")), shown]
    return tag("div", *parts, class_="both")


def _moved(this: Decision, other: Decision) -> Iterator[str]:
    """Rows of the arguments and results that are in both plans, and lie otherwise."""
    before = {v.name: v for v in this.values if v.role != "activation"}
    changed = []
    for value in other.values:
        old = before.get(value.name)
        if (
            old is not None
            and value.role != "activation"
            and (old.sharding, old.stage) != (value.sharding, value.stage)
        ):
            changed.append((value.name, (old.shape, old.dtype, old.sharding, old.stage, value.sharding, value.stage)))
    for path, (shape, dtype, a, at, b, to), count in collapse_paths(changed):
        cells = [tag("td", escape(path + (f" ({count} arrays)" if count > 1 else "")), class_="code")]
        for plan, sharding, stage in ((this, a, at), (other, b, to)):
            mesh = plan.stages[stage].logical_mesh
            where = f"stage {stage}, " if len(plan.stages) > 1 else ""
            size = bytes_text(local_bytes(shape, dtype, sharding, mesh))
            cells.append(tag("td", device_grid(shape, sharding, mesh)))
            cells.append(tag("td", escape(f"{where}{sharding}, {size} each"), title=type_text(shape, dtype)))
        yield tag("tr", *cells)


def measured_html(plan: Decision, timeline: Timeline) -> str:
    """A step as predicted above the same as it was measured: a pipeline's timetables on one scale, and every lane."""
    seconds = max(plan.events.seconds, timeline.seconds)
    places = device_places(plan)
    parts = []
    for name, events in (("predicted", plan.events), ("measured", timeline)) if timeline.events else ():
        title = f"{name}: {seconds_text(events.seconds)}"
        parts += [tag("h3", title), timetable_picture(events.events, places, seconds)]
    lanes = timeline.picture() if isinstance(timeline, MeasuredStep) else ""
    title = tag("h1", escape(f"A step of `{plan.name}`, predicted and measured"))
    return wrapped(title + tag("div", *parts, class_="both") + lanes)
