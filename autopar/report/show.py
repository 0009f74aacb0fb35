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

from autopar.errors import AutoparError
from autopar.plan.decision import Decision
from autopar.report.html import document, plan_html
from autopar.report.pair import pair_document, pair_html


def show(plan: Decision, other: Decision | None = None, *, path: str | Path | None = None) -> Path | None:
    """Show a plan as a page of pictures; with a second one, both beside each other.

    Args:
        plan: From `step.plan(...)` or `Plan.load(...)`.
        other: Another, to compare it with.
        path: Where to write the page, which then is not opened; None: in a notebook it is shown there, elsewhere it is
            written to a temporary file and opened in the browser.

    Returns:
        Where the page was written; None: it is shown in the notebook.

    Raises:
        AutoparError: What is to be shown is no plan, or the file cannot be written.
    """
    for each in (plan, *([] if other is None else [other])):
        if not isinstance(each, Decision):
            raise AutoparError(
                "only plans can be shown.",
                given=f"show({each!r})",
                wrong=f"it is of type {type(each).__name__}.",
                do="pass what step.plan(...) returns, or Plan.load(path).",
            )
    if path is None and _in_notebook():
        notebook = import_module("IPython.display")
        notebook.display(notebook.HTML(plan_html(plan) if other is None else pair_html(plan, other)))
        return None
    text = document(plan) if other is None else pair_document(plan, other)
    if path is not None:
        return write_page(path, text)
    with tempfile.NamedTemporaryFile(
        "w", prefix=f"{plan.name}.", suffix=".html", delete=False, encoding="utf-8"
    ) as file:
        file.write(text)
    written = Path(file.name)
    webbrowser.open(written.as_uri())
    return written


def write_page(path: str | Path, text: str) -> Path:
    """Write a page.

    Raises:
        AutoparError: It cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise AutoparError(
            "the file cannot be written.",
            given=str(path),
            wrong=f"{error.strerror or error}.",
            do="name a file in a directory that exists and may be written to.",
        ) from error
    return Path(path)


def _in_notebook() -> bool:
    """Whether this is a Jupyter kernel, which shows HTML."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and hasattr(shell, "kernel")
