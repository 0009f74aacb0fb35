"""`autopar.show`: shows a plan, or two, as a page in the notebook or in the browser.

In:     plans, of the same program or of two; or one plan and a measured timeline of it.
Out:    the path of the page, if it is a file.
Method: two plans have the same pictures, one above the other on the same scales, so that lengths can be compared; `diff.py`
        adds the differences as tables.
"""

from __future__ import annotations

import sys
import tempfile
import webbrowser
from collections.abc import Iterator
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from autopar.entry import write_whole
from autopar.markup import grid, tag
from autopar.plan.decision import Decision
from autopar.plan.words import bytes_text, seconds_text, type_text
from autopar.report.diff import check_plan, diff_tables, pair_title
from autopar.report.html import device_places, plan_html, section, table_html, whole_file, wrapped
from autopar.report.measured import MeasuredStep
from autopar.report.page import page_of
from autopar.report.paths import collapse_paths
from autopar.report.pictures.memory import memory_pictures, peak_bytes
from autopar.report.pictures.tensors import device_grid
from autopar.report.pictures.time import time_picture
from autopar.report.pictures.timetable import timetable_picture
from autopar.streams.timeline import Timeline


def show(plan: Decision, other: Decision | Timeline | None = None, *, path: str | Path | None = None) -> Path | None:
    """Show a plan as a page of pictures; with a second plan, or a measured step, both on the same scales.

    Args:
        plan: From `step.plan(...)` or `Plan.load(...)`.
        other: Another plan to compare with; or a measured step of `compiled.measure(...)`.
        path: The file to write the page to, without opening it; None: the page is shown in the notebook, or else written
            to a temporary file and opened in the browser.

    Returns:
        The file of the page; None: it is shown in the notebook.

    Raises:
        AutoparError: An argument is not a plan, or the file cannot be written.
    """
    for each, kinds in ((plan, Decision), (other, Decision | Timeline | None)):
        check_plan("only plans can be shown.", f"show({each!r})", each, kinds)
    title, body = _page(plan, other)
    if path is not None:
        return write_page(path, whole_file(title, body))
    if in_notebook():
        notebook = import_module("IPython.display")
        notebook.display(notebook.HTML(body))
        return None
    with tempfile.NamedTemporaryFile(
        "w", prefix=f"{plan.name}.", suffix=".html", delete=False, encoding="utf-8"
    ) as file:
        file.write(whole_file(title, body))
    written = Path(file.name)
    webbrowser.open(written.as_uri())
    return written


def _page(plan: Decision, other: Decision | Timeline | None) -> tuple[str, str]:
    """Title and body of a page."""
    match other:
        case None:
            return page_of(plan).title, plan_html(plan)
        case Timeline():
            return f"A step of `{plan.name}`", measured_html(plan, other)
        case _:
            return pair_title(plan, other), pair_html(plan, other)


def write_page(path: str | Path, text: str) -> Path:
    """Write a page. Raises `AutoparError`: it cannot be written."""
    write_whole(path, text, "file")
    return Path(path).resolve()


def in_notebook() -> bool:
    """Whether this is a Jupyter kernel, which shows HTML."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and hasattr(shell, "kernel")


MAX_ROWS = 200


def pair_html(this: Decision, other: Decision) -> str:
    """The page of two plans, as a fragment of HTML."""
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
    """Rows of the arguments and results whose sharding or stage differs between the plans."""
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
            size = bytes_text(sharding.local_bytes(shape, dtype, mesh))
            cells.append(tag("td", device_grid(shape, sharding, mesh)))
            cells.append(tag("td", escape(f"{where}{sharding}, {size} each"), title=type_text(shape, dtype)))
        yield tag("tr", *cells)


def measured_html(plan: Decision, timeline: Timeline) -> str:
    """The page of a step as predicted and as measured: a pipeline's timetables on one scale, and all lanes."""
    seconds = max(plan.events.seconds, timeline.seconds)
    places = device_places(plan)
    parts = []
    for name, events in (("predicted", plan.events), ("measured", timeline)) if timeline.events else ():
        title = f"{name}: {seconds_text(events.seconds)}"
        parts += [tag("h3", title), timetable_picture(events.events, places, seconds)]
    lanes = timeline.picture() if isinstance(timeline, MeasuredStep) else ""
    title = tag("h1", escape(f"A step of `{plan.name}`, predicted and measured"))
    return wrapped(title + tag("div", *parts, class_="both") + lanes)
