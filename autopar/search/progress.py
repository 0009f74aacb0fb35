"""Planning progress on a terminal, one line that goes away; silent where there is none."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console


@contextlib.contextmanager
def planning_progress(name: str) -> Iterator[Callable[[str], None]]:
    """A function that shows a line of progress; on something that is no terminal it shows nothing."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(f"planning {name}") as status:
        yield lambda text: status.update(text)
