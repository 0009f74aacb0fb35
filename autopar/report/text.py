"""Prints a page as text.

In:     `Page`, or tables.
Out:    plain text of 120 columns without colours: the same in a terminal, a log and a golden file.
Method: rich lays out the tables.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from rich import box
from rich.console import Console, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable

from autopar.report.page import Page, Table

WIDTH, INDENT = 120, 2


def page_text(page: Page) -> str:
    """A page as text, without a newline at the end."""
    console = _console(WIDTH)
    with console.capture() as captured:
        _print(page, console)
    return _trimmed(captured.get())


def _print(page: Page, console: Console) -> None:
    console.print(page.title)
    if page.facts:
        grid = RichTable.grid(padding=(0, 3, 0, 0))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for name, text in page.facts:
            grid.add_row(name, text)
        console.print(_indented(grid))
    if page.drawing:
        console.print()
        console.print(_indented(page.drawing))
    for table in page.tables:
        console.print()
        console.print(table.title)
        if table.rows:
            excess = (
                console.measure(_plain(table), options=console.options.update_width(10**4)).maximum + INDENT - WIDTH
            )
            console.print(_indented(_plain(_paths_broken(table, excess) if excess > 0 else table)))
        if table.note:
            console.print(_indented(table.note))


def _console(width: int) -> Console:
    """A console of so many columns that writes text unchanged."""
    # In a notebook rich would display the text, unless it is told otherwise.
    return Console(
        width=width,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
        legacy_windows=False,
        markup=False,
        highlight=False,
        emoji=False,
    )


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


def _plain(table: Table) -> RichTable:
    return _laid_out(table, RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0)))


def _paths_broken(table: Table, excess: int) -> Table:
    """The table with long paths in its first column broken behind a "/", to save `excess` columns."""
    width = max(len(row[0]) for row in table.rows) - excess
    return dataclasses.replace(table, rows=tuple((_broken(row[0], width), *row[1:]) for row in table.rows))


def _broken(path: str, width: int) -> str:
    if " " in path:
        return path  # several words, between which rich breaks
    lines = [""]
    for part in re.findall(r"[^/]*/|[^/]+$", path):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _laid_out(table: Table, laid_out: RichTable, no_wrap: bool = False) -> RichTable:
    """The columns and rows added to a table of rich; `no_wrap`: all cells stay on one line, not only numbers."""
    for position, name in enumerate(table.columns):
        is_number = position in table.numbers
        justify: JustifyMethod = "right" if is_number else "left"
        laid_out.add_column(name, justify=justify, no_wrap=is_number or no_wrap, overflow="fold")
    for row in table.rows:
        laid_out.add_row(*row)
    return laid_out


def _indented(what: RenderableType) -> Padding:
    return Padding(what, (0, 0, 0, INDENT), expand=False)


def wide_text(tables: Iterable[Table], width: int) -> str:
    """Tables as text in which every cell stays on one line."""
    console = _console(width)
    with console.capture() as captured:
        for table in tables:
            titled = RichTable(title=table.title, title_justify="left", box=None, pad_edge=False)
            console.print(_laid_out(table, titled, no_wrap=True))
    return _trimmed(captured.get())
