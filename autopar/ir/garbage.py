"""Turns Python's cyclic garbage collector off while passes run; reference counting still frees memory.

Method: passes make millions of small objects and no cycles, and the collector's scans of them took a sixth of planning time.
        Objects made meanwhile are moved to the oldest generation at the end: otherwise the collector would scan them all at
        once, as one young generation.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Disable collection in the `with` block, and restore the collector's state after it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # leave objects alone that somebody else has frozen
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()
