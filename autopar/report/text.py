"""A plan as text, one page.

In:     the plan, a `Decision`.
Out:    plain text, 120 columns, no colours: the same in a terminal, a log and a golden file.
Method: tables laid out by rich.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable

from autopar.report.page import Page, Table

WIDTH = 120


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
            plain = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
            console.print(_indented(_laid_out(table, plain)))
        if table.note:
            console.print(_indented(table.note))


def _console(width: int) -> Console:
    """Of so many columns, which writes everything as it stands."""
    # In a notebook rich displays what it is asked to write, unless it is told that this is none.
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


def _laid_out(table: Table, laid_out: RichTable, no_wrap: bool = False) -> RichTable:
    """The table's columns and rows in one of rich's; `no_wrap`: every cell stays on one line, and not numbers alone."""
    for position, name in enumerate(table.columns):
        is_number = position in table.numbers
        justify: JustifyMethod = "right" if is_number else "left"
        laid_out.add_column(name, justify=justify, no_wrap=is_number or no_wrap, overflow="fold")
    for row in table.rows:
        laid_out.add_row(*row)
    return laid_out


def _indented(what: RenderableType) -> Padding:
    return Padding(what, (0, 0, 0, 2), expand=False)


def wide_text(tables: Iterable[Table], width: int) -> str:
    """Tables as text in which every cell stays on one line."""
    console = _console(width)
    with console.capture() as captured:
        for table in tables:
            titled = RichTable(title=table.title, title_justify="left", box=None, pad_edge=False)
            console.print(_laid_out(table, titled, no_wrap=True))
    return _trimmed(captured.get())
