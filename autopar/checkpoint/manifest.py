"""Writes and checks the manifest of a checkpoint, which lists its files, so that a damaged one is always detected.

In:     a folder that orbax has written, and the types of its leaves.
Out:    `autopar.json` in the folder; later, the first thing that is wrong with the folder.
Method: the manifest has the size and SHA-256 of each file, and a SHA-256 of its own content; its text must be, byte for byte,
        what writing its content gives. It is written last, when the files that it lists have reached the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from autopar.checkpoint.leaves import LeafType
from autopar.runtime.digest import Digest, digest

NAME = "autopar.json"
NOTE = "autopar-run.json"
"""The file with a training run's note beside its state."""
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a step's checkpoint: the type of each leaf, and the digest of each file, by path."""

    step: int
    leaves: dict[tuple[str, ...], LeafType]
    files: dict[str, Digest]

    def text(self) -> str:
        """The manifest as text, for its file."""
        content = {
            "format": FORMAT,
            "step": self.step,
            "leaves": [[list(path), t.kind, list(t.shape), t.dtype] for path, t in self.leaves.items()],
            "files": {name: list(entry) for name, entry in sorted(self.files.items())},
        }
        body = json.dumps(content)
        return json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "content": content})


def write_manifest(
    folder: Path, step: int, leaves: dict[tuple[str, ...], LeafType], known: Mapping[str, Digest]
) -> None:
    """Write the manifest of all files of a folder, and flush these to disk; `known`: those that others have flushed."""
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())

    def entry(name: str) -> Digest:
        if name not in known:
            return digest(folder / name, sync=True)
        there = (folder / name).stat().st_size
        if there != known[name][0]:
            raise OSError(f"{name} has {there} bytes here, and {known[name][0]} where it was written")
        return known[name]

    missing = [name for name in known if name not in names]
    if missing:
        raise OSError(f"{missing[0]} is not seen here by the process that commits the checkpoint")
    with ThreadPoolExecutor(8) as threads:
        entries = list(threads.map(entry, names))
    text = Manifest(step, leaves, dict(zip(names, entries, strict=True))).text()
    with open(folder / NAME, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    for place in (folder, *(p for p in folder.rglob("*") if p.is_dir())):
        sync_folder(place)


def read_manifest(folder: Path) -> Manifest | str:
    """The manifest; or, as text, why there is none."""
    try:
        text = (folder / NAME).read_text(encoding="utf-8")
    except OSError as error:
        return f"it has no {NAME} ({error.strerror}): autopar has not finished it, or something else wrote it"
    except UnicodeDecodeError:
        return f"{NAME} is damaged"
    try:
        content = json.loads(text)["content"]
        if content["format"] > FORMAT:
            return f"{NAME} is of format {content['format']}, of a later version of autopar; this one reads {FORMAT}"
        found = Manifest(
            content["step"],
            {tuple(path): LeafType(kind, tuple(shape), dtype) for path, kind, shape, dtype in content["leaves"]},
            {name: (entry[0], entry[1]) for name, entry in content["files"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return f"{NAME} is damaged"
    return found if found.text() == text else f"{NAME} is damaged"


def damage(folder: Path, manifest: Manifest) -> str | None:
    """What is wrong with the files, as text; None: nothing. Reads all of them, unless a size is wrong."""
    for name, (size, _) in manifest.files.items():
        try:
            there = (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if there != size:
            return f"{name} has {there} bytes, not {size}"
    with ThreadPoolExecutor(8) as threads:
        for name, found in zip(manifest.files, threads.map(lambda n: digest(folder / n), manifest.files), strict=True):
            if found != manifest.files[name]:
                return f"{name} has other content than was written (its SHA-256 differs)"
    return None


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
