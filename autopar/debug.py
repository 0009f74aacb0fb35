"""Developer aids, and the only place that reads environment variables.

In:     `AUTOPAR_DUMP=dir` and `AUTOPAR_CHECK=1`, read at each call; `XLA_FLAGS`, whose flags are not set a second time.
Out:    `dump("trace", text)` writes dir/01_trace.txt, the next pass 02_..., so that two runs can be compared by `diff`.
        `check_after("trace", check, made)` runs a checker on a pass's result, and names the pass if the check fails.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_Made = TypeVar("_Made")
_NUMBERED = re.compile(r"(\d+)_.*\.txt")
_ADDRESS = re.compile(r"Var\(id=(\d+)\)")


def dump_dir() -> Path | None:
    """The directory that passes are written to, or None."""
    path = os.environ.get("AUTOPAR_DUMP")
    return Path(path) if path else None


def xla_flags() -> tuple[str, ...]:
    """Names of the flags that the user gives XLA; these are left as they are."""
    return tuple(re.findall(r"--(\w+)", os.environ.get("XLA_FLAGS", "")))


def check_after(pass_name: str, check: Callable[[_Made], None], made: _Made) -> None:
    """With `AUTOPAR_CHECK=1`, run a checker on the result of a pass.

    `check`: raises an `AssertionError` if the result is ill-formed.

    Raises `AssertionError`: it is; names the pass.
    """
    if os.environ.get("AUTOPAR_CHECK", "") in ("", "0"):
        return
    try:
        check(made)
    except AssertionError as error:
        raise AssertionError(f"wrong after the pass `{pass_name}`: {error}") from error


def dump(pass_name: str, text: str | Callable[[], str]) -> Path | None:
    """Write the text of a pass's result, or what a function returns, to the next numbered file; None: dumps are off."""
    directory = dump_dir()
    if directory is None:
        return None
    directory.mkdir(parents=True, exist_ok=True)
    numbers = [int(match.group(1)) for file in directory.iterdir() if (match := _NUMBERED.fullmatch(file.name))]
    path = directory / f"{max(numbers, default=0) + 1:02d}_{pass_name}.txt"
    content = text if isinstance(text, str) else text()
    path.write_text(_stable(content).rstrip("\n") + "\n")
    return path


def _stable(text: str) -> str:
    """The text with addresses of variables replaced by their order, so that two runs can be compared."""
    numbers: dict[str, int] = {}
    return _ADDRESS.sub(lambda match: f"v{numbers.setdefault(match.group(1), len(numbers))}", text)
