"""Runs a list of passes over a program, and passes without Python's cyclic garbage collector.

In:     a list of `Pass`es, and a form: a program and what belongs to it.
Out:    the form that the last pass returns.
Method: in order. `AUTOPAR_CHECK=1` runs the form's checker after each pass, and names the pass that breaks it. Each phase
        keeps its list where it runs it; `search/passes.py` has all of them. Passes make millions of small objects and, as a
        test holds, no cycles, and the collector's scans of them took a sixth of planning time; reference counting still frees
        memory. Objects made meanwhile are moved to the oldest generation at the end: otherwise the collector would scan them
        all at once, as one young generation.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from autopar.debug import check_after

Form = TypeVar("Form")


@dataclass(frozen=True, slots=True)
class Pass(Generic[Form]):
    """One pass.

    Attributes:
        name: The name of its module.
        what: What it does, for people.
        run: The function from a form to the next.
    """

    name: str
    what: str
    run: Callable[[Form], Form]


def run_passes(passes: Sequence[Pass[Form]], given: Form, check: Callable[[Form], None]) -> Form:
    """Run the passes in order; the last one's result.

    `check`: raises an `AssertionError` for an ill-formed form.

    Raises `AssertionError`: with checks on; names the pass that made the form wrong.
    """
    for each in passes:
        given = each.run(given)
        check_after(each.name, check, given)
    return given


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Disable collection in the `with` block, and restore the collector's state after it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # leave objects alone that somebody else has frozen
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()
