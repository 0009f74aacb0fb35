"""`autopar.show`: a plan, or two, as a page in the notebook, or in the browser.

In:     plans.
Out:    the path of the page, where it is a file.
"""

from __future__ import annotations

import sys
import tempfile
import webbrowser
from importlib import import_module
from pathlib import Path
from typing import Any

from autopar.entry import write_whole
from autopar.errors import AutoparError
from autopar.plan.decision import Decision
from autopar.report.html import measured_html, pair_html, pair_title, plan_html, whole_file
from autopar.report.page import page_of
from autopar.streams.timeline import Timeline


def show(plan: Decision, other: Decision | Timeline | None = None, *, path: str | Path | None = None) -> Path | None:
    """Show a plan as a page of pictures; with a second one, or a measured step, both beside each other.

    Args:
        plan: From `step.plan(...)` or `Plan.load(...)`.
        other: Another, to compare it with; or what `compiled.measure(...)` found: the step as predicted, and as measured.
        path: Where to write the page, which then is not opened; None: in a notebook it is shown there, elsewhere it is
            written to a temporary file and opened in the browser.

    Returns:
        Where the page was written; None: it is shown in the notebook.

    Raises:
        AutoparError: What is to be shown is no plan, or the file cannot be written.
    """
    for each, kinds in ((plan, Decision), (other, Decision | Timeline | None)):
        if not isinstance(each, kinds):
            raise AutoparError(
                "only plans can be shown.",
                given=f"show({each!r})",
                wrong=f"it is of type {type(each).__name__}.",
                do="pass what step.plan(...) returns, or Plan.load(path).",
            )
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
    """Write a page.

    Raises:
        AutoparError: It cannot be written.
    """
    write_whole(path, text, "file")
    return Path(path).resolve()


def in_notebook() -> bool:
    """Whether this is a Jupyter kernel, which shows HTML."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and hasattr(shell, "kernel")
