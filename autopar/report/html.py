"""A plan as a piece of HTML, for notebooks.

In:     the plan, a `Decision`.
Out:    one `<div>` that needs nothing else: no scripts, no files; the same page as the text.
"""

from __future__ import annotations

from html import escape

from autopar.plan.decision import Decision
from autopar.report.page import Table, page_of

_STYLE = """<style>
.autopar-plan { font-family: sans-serif; font-size: 13px; }
.autopar-plan table { border-collapse: collapse; margin: 4px 0 8px 12px; }
.autopar-plan th, .autopar-plan td { text-align: left; padding: 1px 14px 1px 0; }
.autopar-plan thead th { border-bottom: 1px solid currentColor; }
.autopar-plan .number { text-align: right; }
.autopar-plan td.code { font-family: monospace; }
</style>"""


def plan_html(plan: Decision) -> str:
    """The page of a plan as HTML."""
    page = page_of(plan)
    facts = "\n".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in page.facts)
    tables = "\n".join(_table(table, is_open=k == 0) for k, table in enumerate(page.tables))
    head = f"<b>{escape(page.title)}</b>\n<table>\n{facts}\n</table>"
    drawing = f"\n<pre>{escape(page.drawing)}</pre>" if page.drawing else ""
    return f'{_STYLE}\n<div class="autopar-plan">\n{head}{drawing}\n{tables}\n</div>'


def document(plan: Decision) -> str:
    """A whole HTML file."""
    title = escape(page_of(plan).title)
    head = f'<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>'
    return f"{head}\n{plan_html(plan)}\n</html>\n"


def _table(table: Table, is_open: bool) -> str:
    head = "".join(f"<th{_class(table, k)}>{escape(name)}</th>" for k, name in enumerate(table.columns))
    body = "\n".join(
        "<tr>" + "".join(f"<td{_class(table, k)}>{escape(cell)}</td>" for k, cell in enumerate(row)) + "</tr>"
        for row in table.rows
    )
    note = f"<p>{escape(table.note)}</p>" if table.note else ""
    return (
        f"<details{' open' if is_open else ''}><summary>{escape(table.title)} ({len(table.rows)} rows)</summary>\n"
        f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table>{note}</details>"
    )


def _class(table: Table, column: int) -> str:
    return ' class="number"' if column in table.numbers else ' class="code"'
