"""A directory of checkpoints: one folder per step, named by its number.

In:     the directory.
Out:    the steps in it; a finished folder put in its place; old ones taken away.
Method: a checkpoint is made in a folder with another name and appears by one rename; it disappears by one too, before
        its files are deleted. A process that is killed leaves such a folder behind; the next owner (`owner.py`) removes it.
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
"""Workplaces of this process. State of the module, as the directories are."""


def steps(directory: str | os.PathLike) -> list[int]:
    """Numbers of the checkpoints in a directory, rising; whether they are good is not looked at."""
    root = Path(directory)
    return sorted(int(p.name) for p in root.iterdir() if _is_step(p.name) and p.is_dir()) if root.is_dir() else []


def latest(directory: str | os.PathLike) -> int | None:
    """The newest checkpoint that is whole; None: there is none. Reads it all, to be sure."""
    for step in reversed(steps(directory)):
        if isinstance(check(directory, step), Manifest):
            return step
    return None


def check(directory: str | os.PathLike, step: int) -> Manifest | str:
    """The manifest of a whole checkpoint; or, in words, what is wrong with it."""
    folder = step_folder(directory, step)
    manifest = read_manifest(folder)
    if isinstance(manifest, str):
        return manifest
    if manifest.step != step:
        return f"it is the checkpoint of step {manifest.step}, under another name"
    return damage(folder, manifest) or manifest


def read_note(directory: str | os.PathLike, step: int) -> dict[str, Any]:
    """What a run wrote down beside its state, in a checkpoint that is known to be whole; nothing, if it wrote nothing."""
    place = step_folder(directory, step) / NOTE
    return json.loads(place.read_text(encoding="utf-8")) if place.exists() else {}


def step_number(step: Any) -> int:
    """The number of a step, also where it is an array's.

    Raises:
        CheckpointError: It is no whole number, or below 0.
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
    """Where the checkpoint of a step is."""
    return Path(directory).absolute() / str(step)


def open_workplace(directory: str | os.PathLike) -> Path:
    """A folder to make a checkpoint in, with a name that no one takes for one.

    Raises:
        CheckpointError: The directory cannot be written, or is another process's.
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
    """Remove it with all that is in it, also what comes up meanwhile, of one who was still writing.

    What comes up later than `_LATE_SECONDS` the next save removes.
    """
    if place in _OPEN:
        _OPEN.remove(place)
    until = time.monotonic() + _LATE_SECONDS
    shutil.rmtree(place, ignore_errors=True)
    while place.exists() and time.monotonic() < until:
        time.sleep(0.01)
        shutil.rmtree(place, ignore_errors=True)


def commit(workplace: Path, folder: Path) -> None:
    """Put a finished checkpoint in its place; one of that number that is there already gives way.

    Raises:
        CheckpointError: The directory is another process's by now, which took this one for dead.
    """
    claim(folder.parent)
    if folder.exists():
        os.rename(folder, workplace / f"replaced-{folder.name}")
    os.rename(workplace / "made", folder)
    sync_folder(folder.parent)
    close_workplace(workplace)


def prune(directory: Path, newest: int, keep: int) -> None:
    """Remove all but the last `keep` checkpoints up to `newest`; later numbers stay."""
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
    """Delete what others have left: no other process lives that writes here, or this one would not own the directory."""
    for place in root.glob(f"{_UNFINISHED}*"):
        is_ours = re.fullmatch(r".+-\d+-[0-9a-f]+", place.name.removeprefix(_UNFINISHED), re.ASCII)
        if is_ours and place not in _OPEN:
            for old in place.glob("replaced-*"):  # killed between the two renames: the second is made up for
                folder = root / old.name.removeprefix("replaced-")
                if not folder.exists() and (place / "made").exists():
                    os.rename(place / "made", folder)
            shutil.rmtree(place, ignore_errors=True)
