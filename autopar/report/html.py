"""Renders a plan as a page of HTML: pictures, then the tables of its text.

In:     `Decision`.
Out:    a fragment for a notebook (`plan_html`), or a whole file (`whole_file`); both load nothing, and can be printed.
Method: one file of `pictures/` per picture; pictures that have nothing to show are left out. One style sheet (`style.css`) for
        light, dark and print: colours are variables, and dark mode follows the reader's system or notebook. A short script
        (`script.js`) for tooltips and search, without which the page works: tooltips are then titles. Both affect only
        elements of class `autopar-plan`.
"""

from __future__ import annotations

import importlib.resources
import math
import string
from collections.abc import Iterator
from html import escape

from autopar.markup import grid, tag
from autopar.plan.decision import Decision
from autopar.plan.words import bytes_text, count_text, seconds_text
from autopar.report.page import Table, page_of
from autopar.report.pictures.memory import memory_pictures
from autopar.report.pictures.model import model_picture
from autopar.report.pictures.tensors import tensor_table
from autopar.report.pictures.time import time_picture
from autopar.report.pictures.timetable import timetable_picture


def plan_html(plan: Decision) -> str:
    """The page of a plan, as a fragment of HTML."""
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
    """The body of a page, with style and script."""
    return f'{STYLE}\n<div class="autopar-plan">\n{body}\n</div>\n{SCRIPT}'


def whole_file(title: str, body: str) -> str:
    """A page as a whole HTML file."""
    head = (
        '<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>'
    )
    return f'{head}\n<body class="autopar">\n{body}\n</body>\n</html>\n'


def _cards(plan: Decision) -> Iterator[str]:
    """The main figures."""
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
    """The devices of each mesh, as text."""
    found = {}
    for mesh, submesh in enumerate(dict.fromkeys(stage.submesh for stage in plan.stages)):
        found[mesh] = f"device{'s' * (submesh.num_devices > 1)} {submesh}"
    return found


def table_html(table: Table, is_open: bool = False) -> str:
    """A table that can be opened; `is_open`: it is open at first."""
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


_LIGHT = """--bg:#fff; --ink:#1d2329; --soft:#66707c; --line:#dde1e6; --card:#f5f6f8; --wait:#edf0f3; --on:#fff;
 --f:#3f7fd6; --b:#2b9a74; --w:#86cdb0; --u:#dd9933; --init:#9aa3af; --transfer:#b565a7; --gather:#c65f94; --scatter:#8a63c4;
 --reduce:#d0605e; --alltoall:#a8557f; --permute:#77558f; --area:#bcd3f2;
 --stroke:#3f7fd6; --budget:#c23b33; --whole:#c9cfd7;"""
_DARK = """--bg:#14181d; --ink:#e8ebef; --soft:#9aa5b1; --line:#343c46; --card:#1d232a; --wait:#242b33; --on:#0f1317;
 --f:#6aa5f2; --b:#4cc294; --w:#2e7a5c; --u:#e8b35a; --init:#7d8896; --transfer:#cf8bc4; --gather:#e089b5; --scatter:#ac8ae0;
 --reduce:#e98683; --alltoall:#cc7fa5; --permute:#a284ba; --area:#25405f;
 --stroke:#6aa5f2; --budget:#f0766d; --whole:#4a535e;"""
_PARTS = ("#3f7fd6", "#dd9933", "#2b9a74", "#8a63c4", "#d0605e", "#4fb3bf", "#b08968", "#c65f94", "#9aa3af")
_PIECES = (
    *("#3f7fd6", "#dd9933", "#2b9a74", "#d0605e", "#8a63c4", "#4fb3bf"),
    *("#c65f94", "#a3b144", "#7088a8", "#b08968", "#5b6ee1", "#6fae5c"),
)
_KINDS = {
    "F": "f",
    "M": "init",
    "B": "b",
    "W": "w",
    "U": "u",
    "init": "init",
    "transfer": "transfer",
    "all-gather": "gather",
    "reduce-scatter": "scatter",
    "all-reduce": "reduce",
    "all-to-all": "alltoall",
    "ragged-all-to-all": "alltoall",
    "collective-permute": "permute",
    "wait": "wait",
}


def _fills() -> str:
    """CSS rules with the fill (for shapes) and background (for swatches in text) of each colour."""
    pairs = [(f"k-{kind}", f"var(--{name})") for kind, name in _KINDS.items()]
    pairs += [(f"c{k}", colour) for k, colour in enumerate(_PARTS)]
    pairs += [(f"p{k}", colour) for k, colour in enumerate(_PIECES)]
    pairs.append(("whole", "var(--whole)"))
    return "\n".join(f".autopar-plan .{name} {{ fill:{colour}; background:{colour} }}" for name, colour in pairs)


def _file(name: str) -> str:
    return importlib.resources.files("autopar.report").joinpath(name).read_text(encoding="utf-8")


STYLE = f"<style>\n{string.Template(_file('style.css')).substitute(light=_LIGHT, dark=_DARK, fills=_fills())}</style>"
SCRIPT = f"<script>\n{_file('script.js')}</script>"
