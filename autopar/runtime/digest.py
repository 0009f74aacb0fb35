"""What is in a file, in a few bytes.

In:     a file.
Out:    its size and its SHA-256.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

Digest = tuple[int, str]
"""Bytes of a file, and their SHA-256."""


def digest(path: Path, *, sync: bool = False) -> Digest:
    """Size and SHA-256 of a file; with `sync` it has reached the disk by then."""
    with open(path, "rb") as file:
        if sync:
            os.fsync(file.fileno())
        content = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), content
