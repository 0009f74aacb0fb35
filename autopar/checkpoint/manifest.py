"""The manifest: what a whole checkpoint consists of, so that a damaged one is never taken for good.

In:     a folder that orbax has written, and the types of its leaves.
Out:    `autopar.json` in it; later, the first thing that is wrong with the folder.
Method: size and SHA-256 of each file. The manifest is signed by its own: it must be, byte for byte, what writing its
        content gives. It is written last and the files it names have reached the disk by then.
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
"""What a training run wrote down beside its state."""
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is in a checkpoint of a step: the type of each leaf, and (bytes, SHA-256) of each file, by its path."""

    step: int
    leaves: dict[tuple[str, ...], LeafType]
    files: dict[str, Digest]

    def text(self) -> str:
        """The manifest as its file has it."""
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
    """Record every file of `folder`, and see them to the disk; `known` are those that others have seen to it."""
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
    """The manifest; or, in words, why there is none."""
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
    """What is wrong with the files, in words; None: nothing. Reads all of them, unless a size is wrong already."""
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
    """See the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
