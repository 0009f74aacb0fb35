"""Loggers for `autopar.fit`: a CSV file, TensorBoard. Any function of a step's number and its values is a logger too.

In:     the number of steps done, values by name; before the first, the step that the run resumes from.
Out:    `CSV`: a file that any program reads, complete at any moment. `TensorBoard`: its event files.
Method: a resumed run does some steps again: their log entries are removed first.
"""

from __future__ import annotations

import csv
import itertools
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError

Logger = Callable[[int, Mapping[str, float]], Any]
"""`logger(number, values)`. Its method `resume(number)`, if it has one, is called with the number of steps done, before the
first call and after each recovered failure; its method `close()`, if it has one, when the run ends."""


class CSV:
    """A CSV file with a row per logged step and a column per value; rewritten only for a new column."""

    def __init__(self, path: str | os.PathLike):
        """Log to the file `path`, which is not touched before the first row."""
        self.path = Path(path)

    def resume(self, number: int) -> None:
        """Remove the rows of steps that will be done again; if a run starts from 0, move the last run's file aside."""
        columns, rows = self._read()
        if rows and number == 0:
            aside = (self.path.with_suffix(f".{k}{self.path.suffix}") for k in itertools.count(1))
            os.replace(self.path, next(path for path in aside if not path.exists()))
        elif rows:
            self._write(columns, [row for row in rows if int(row["step"]) <= number])

    def __call__(self, number: int, values: Mapping[str, float]) -> None:
        """Add a row."""
        columns = self._columns()
        if any(name not in columns for name in values):
            columns, rows = self._read()
            columns = list(dict.fromkeys(["step", *columns, *values]))
            self._write(columns, rows)
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, columns).writerow({"step": number, **values})

    def _columns(self) -> list[str]:
        if not self.path.exists():
            return []
        with self.path.open(newline="", encoding="utf-8") as file:
            return next(csv.reader(file), [])

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        if not self.path.exists():
            return [], []
        with self.path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            return list(reader.fieldnames or []), [row for row in reader if (row.get("step") or "").isdigit()]

    def _write(self, columns: list[str], rows: list[dict[str, str]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        made = self.path.with_name(f".{self.path.name}.new")
        with made.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(made, self.path)


class TensorBoard:
    """Event files for TensorBoard, by tensorboardX; `**options` are those of its `SummaryWriter`."""

    def __init__(self, directory: str | os.PathLike, **options: Any):
        """Raises `AutoparError` if tensorboardX is not installed."""
        try:
            from tensorboardX import SummaryWriter
        except ModuleNotFoundError as error:
            raise AutoparError(
                "TensorBoard's files are written by tensorboardX.",
                given=f"TensorBoard({os.fspath(directory)!r})",
                wrong=f"{error.name} is not installed.",
                do="pip install 'autopar[tensorboard]', or log with CSV(path).",
            ) from error
        self._writer_class, self._directory, self._options = SummaryWriter, os.fspath(directory), options
        self._writer: Any = None

    def resume(self, number: int) -> None:
        """Make TensorBoard drop the points of steps that will be done again."""
        self.close()
        # Event files are named by the second: a suffix keeps two of the same second apart.
        options: dict[str, Any] = {"filename_suffix": f".{secrets.token_hex(4)}", "flush_secs": 10, **self._options}
        self._writer = self._writer_class(self._directory, **{**options, "purge_step": number + 1})

    def __call__(self, number: int, values: Mapping[str, float]) -> None:
        """Add a point to each curve."""
        if self._writer is None:
            self.resume(number - 1)
        for name, value in values.items():
            self._writer.add_scalar(name, value, number)

    def close(self) -> None:
        """Flush to disk; a later point starts another file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
