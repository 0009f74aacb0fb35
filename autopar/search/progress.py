"""Planning while somebody waits: progress on a terminal, one line that goes away; and Ctrl-C, which ends it in one line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console


@contextlib.contextmanager
def planning_progress(name: str) -> Iterator[Callable[[str], None]]:
    """A function that shows a line of progress; on something that is no terminal it shows nothing.

    Raises:
        KeyboardInterrupt: Planning was stopped; where in the planner that was is left out.
    """
    try:
        with _status(name) as report:
            yield report
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"planning `{name}` was stopped: there is no plan, and nothing has run") from None


@contextlib.contextmanager
def _status(name: str) -> Iterator[Callable[[str], None]]:
    console = Console(file=sys.stderr, force_jupyter=False)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(f"planning {name}") as status:
        yield lambda text: status.update(text)
