"""Computes the digest of a file.

In:     a file.
Out:    its size and its SHA-256.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

Digest = tuple[int, str]
"""Size of a file in bytes, and its SHA-256."""


def digest(path: Path, *, sync: bool = False) -> Digest:
    """Size and SHA-256 of a file; with `sync`, the file has reached the disk on return."""
    with open(path, "rb") as file:
        if sync:
            os.fsync(file.fileno())
        content = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), content
