"""Plans as files: JSON that is read back, compared, and put under version control.

In:     a plan and a path.
Out:    a file with one entry per line; or the plan again, its shardings by path until it is compiled for its program.
Method: everything is checked when it is read (`read.py`), so that damage is a `PlanFileError` that names the entry, never a
        surprise later. What stands there: `record.py`.
"""

from __future__ import annotations

from pathlib import Path

from autopar.entry import DamageError, read_versioned, unwritable, write_whole
from autopar.errors import PlanFileError
from autopar.plan.decision import Decision
from autopar.plan.read import read_plan
from autopar.plan.record import FORMAT, VERSION, dumps, record_of


def save_decision(plan: Decision, path: str | Path) -> None:
    """Write a plan as JSON.

    Raises:
        PlanFileError: The file cannot be written.
    """
    try:
        write_whole(path, dumps(record_of(plan)))
    except OSError as error:
        raise unwritable(PlanFileError, "plan", path, error) from error


def load_decision(path: str | Path) -> Decision:
    """Read a plan that `save_decision` wrote.

    Raises:
        PlanFileError: The file is missing, damaged, or of another version.
    """
    try:
        return read_plan(read_versioned(path, FORMAT, VERSION))
    except DamageError as error:
        raise PlanFileError(
            "the file cannot be read as a plan.",
            given=str(path),
            wrong=str(error),
            do="plan again, step.plan(...).save(path), with the autopar that is to read it.",
            path=str(path),
        ) from error
