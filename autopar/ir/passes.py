"""Passes: what is done to a program, as lists that are carried out as they stand.

In:     a list of `Pass`es, and what goes through them: a program and what belongs to it.
Out:    what comes out behind the last.
Method: one after the other. `AUTOPAR_CHECK=1` runs the checker of that form behind each, so that a pass that makes a
        program wrong is named. Each phase's list stands where it is carried out; `search/passes.py` has all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from autopar.debug import check_behind

Form = TypeVar("Form")


@dataclass(frozen=True, slots=True)
class Pass(Generic[Form]):
    """One pass.

    Attributes:
        name: That of its module.
        what: What it does, for people.
        run: From what it is given to what it makes of it.
    """

    name: str
    what: str
    run: Callable[[Form], Form]


def run_passes(passes: Sequence[Pass[Form]], given: Form, check: Callable[[Form], None]) -> Form:
    """Carry out a list.

    `check`: raises an `AssertionError` for what is no such form.

    Raises:
        AssertionError: If checks are on: it names the pass behind which the form is wrong.
    """
    for each in passes:
        given = each.run(given)
        check_behind(each.name, check, given)
    return given
