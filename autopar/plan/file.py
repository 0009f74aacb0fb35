"""Plans as files: JSON that is read back, compared, and put under version control.

In:     a plan and a path.
Out:    a file with one entry per line; or the plan again, its shardings by path until it is compiled for its program.
Method: everything is checked when it is read (`read.py`), so that damage is a `PlanFileError` that names the entry, never a
        surprise later. What stands there: `record.py`. Written beside the target and renamed, so that a reader never sees
        half a plan.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from autopar.entry import DamageError, Entry, read_json
from autopar.errors import PlanFileError
from autopar.plan.decision import Decision
from autopar.plan.read import read_plan
from autopar.plan.record import FORMAT, VERSION, dumps, record_of


def save_decision(plan: Decision, path: str | Path) -> None:
    """Write a plan as JSON.

    Raises:
        PlanFileError: The file cannot be written.
    """
    path = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".", suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(dumps(record_of(plan)))
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise PlanFileError(
            "the plan cannot be saved.",
            given=str(path),
            wrong=f"{error.strerror or error}.",
            do="name a file in a directory that exists and may be written to.",
            path=str(path),
        ) from error


def load_decision(path: str | Path) -> Decision:
    """Read a plan that `save_decision` wrote.

    Raises:
        PlanFileError: The file is missing, damaged, or of another version.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _error(
            path, f"{error.strerror}." if isinstance(error, OSError) and error.strerror else "it is not text."
        ) from error
    try:
        record = read_json(text)
    except DamageError as error:
        raise _error(path, str(error)) from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise _error(path, f'it is JSON, but no plan: "format" is not "{FORMAT}".')
    if record.get("version") != VERSION:
        raise _error(path, f"it is of version {record.get('version')!r}; this autopar reads version {VERSION}.")
    try:
        return read_plan(Entry(record, ""))
    except DamageError as error:
        raise _error(path, str(error)) from error


def _error(path: str | Path, wrong: str) -> PlanFileError:
    return PlanFileError(
        "the file cannot be read as a plan.",
        given=str(path),
        wrong=wrong,
        do="plan again, step.plan(...).save(path), with the autopar that is to read it.",
        path=str(path),
    )
