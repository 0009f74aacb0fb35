"""Manages a directory of checkpoints: one folder per step, named by its number.

In:     the directory.
Out:    the steps in it; finished checkpoints moved into place; old ones removed.
Method: a checkpoint is written in a folder with another name, the workplace, and appears by one rename; it disappears by one
        rename too, before its files are deleted. A killed process leaves its workplace behind; the next owner (`owner.py`)
        removes it.
"""

from __future__ import annotations

import json
import operator
import os
import re
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

from autopar.checkpoint.manifest import NOTE, Manifest, damage, read_manifest, sync_folder
from autopar.checkpoint.owner import claim, this_process, writing_in
from autopar.errors import CheckpointError

_UNFINISHED = ".autopar-"
_LATE_SECONDS = 2.0
_OPEN: list[Path] = []
"""The workplaces of this process. Module state, like the directories themselves."""


def steps(directory: str | os.PathLike) -> list[int]:
    """The numbers of the checkpoints in a directory, ascending; does not check whether they are damaged."""
    root = Path(directory)
    return sorted(int(p.name) for p in root.iterdir() if _is_step(p.name) and p.is_dir()) if root.is_dir() else []


def latest(directory: str | os.PathLike) -> int | None:
    """The newest checkpoint that is not damaged; None: there is none. Reads all of its files."""
    for step in reversed(steps(directory)):
        if isinstance(check(directory, step), Manifest):
            return step
    return None


def check(directory: str | os.PathLike, step: int) -> Manifest | str:
    """The manifest of a checkpoint; or, as text, what is wrong with the checkpoint."""
    folder = step_folder(directory, step)
    manifest = read_manifest(folder)
    if isinstance(manifest, str):
        return manifest
    if manifest.step != step:
        return f"it is the checkpoint of step {manifest.step}, under another name"
    return damage(folder, manifest) or manifest


def read_note(directory: str | os.PathLike, step: int) -> dict[str, Any]:
    """The note of a run beside its state, in a checkpoint that was checked; {}: there is none."""
    place = step_folder(directory, step) / NOTE
    return json.loads(place.read_text(encoding="utf-8")) if place.exists() else {}


def step_number(step: Any) -> int:
    """The number of a step as an int; it may be given as an array.

    Raises `CheckpointError`: it is not an integer, or below 0.
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise CheckpointError(
            "a checkpoint is named by the number of its step.",
            given=f"step={step!r}"
            if isinstance(step, str | float | int)
            else f"step=..., of type {type(step).__name__}",
            wrong="it is no whole number, 0 or more.",
            do="pass such a number, or leave it out: one more than the newest to save, the newest whole one to restore.",
        )
    return number


def step_folder(directory: str | os.PathLike, step: int) -> Path:
    """The folder of the checkpoint of a step."""
    return Path(directory).absolute() / str(step)


def open_workplace(directory: str | os.PathLike) -> Path:
    """Create a workplace: a folder to write a checkpoint in, whose name is not that of a checkpoint.

    Raises `CheckpointError`: the directory cannot be written, or belongs to another process.
    """
    claim(directory)
    root = Path(directory).absolute()
    with writing_in(root):
        _remove_abandoned(root)
        own = this_process()
        place = root / f"{_UNFINISHED}{own.host}-{own.pid}-{uuid.uuid4().hex[:16]}"
        _OPEN.append(place)
        place.mkdir()
    return place


def close_workplace(place: Path) -> None:
    """Remove a workplace, including files that are still being written into it.

    Files that appear later than `_LATE_SECONDS` are removed by the next save.
    """
    if place in _OPEN:
        _OPEN.remove(place)
    until = time.monotonic() + _LATE_SECONDS
    shutil.rmtree(place, ignore_errors=True)
    while place.exists() and time.monotonic() < until:
        time.sleep(0.01)
        shutil.rmtree(place, ignore_errors=True)


def commit(workplace: Path, folder: Path) -> None:
    """Move a finished checkpoint into place, and replace one of the same number.

    Raises `CheckpointError`: another process took this one for dead, and owns the directory now.
    """
    claim(folder.parent)
    if folder.exists():
        os.rename(folder, workplace / f"replaced-{folder.name}")
    os.rename(workplace / "made", folder)
    sync_folder(folder.parent)
    close_workplace(workplace)


def prune(directory: Path, newest: int, keep: int) -> None:
    """Remove all but the last `keep` checkpoints with numbers up to `newest`; higher numbers stay."""
    old = [s for s in steps(directory) if s <= newest][:-keep]
    if not old:
        return
    place = open_workplace(directory)
    for step in old:
        os.rename(step_folder(directory, step), place / str(step))
    close_workplace(place)


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdigit() and str(int(name)) == name


def _remove_abandoned(root: Path) -> None:
    """Delete workplaces that others have left: no process uses them, since this process owns the directory."""
    for place in root.glob(f"{_UNFINISHED}*"):
        is_ours = re.fullmatch(r".+-\d+-[0-9a-f]+", place.name.removeprefix(_UNFINISHED), re.ASCII)
        if is_ours and place not in _OPEN:
            for old in place.glob("replaced-*"):  # killed between the two renames: complete the second
                folder = root / old.name.removeprefix("replaced-")
                if not folder.exists() and (place / "made").exists():
                    os.rename(place / "made", folder)
            shutil.rmtree(place, ignore_errors=True)
