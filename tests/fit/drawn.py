"""What a run would draw from its batches."""

from __future__ import annotations

from typing import Any

from autopar.fit.batches import Batches, EndOfBatches


def all_of(batches: Batches, start: int = 0) -> list[Any]:
    """Every batch from number `start` on."""
    found: list[Any] = []
    while True:
        try:
            found.append(batches.at(start + len(found)))
        except EndOfBatches:
            return found
