"""Turns Python's garbage collector off while passes run.

In:     (a function that makes millions of small objects.)
Out:    the same function, in which Python frees what nobody refers to, and does not look for circles.
Method: the collector goes through all objects whenever some are new, and finds nothing: a sixth of the time of planning. What
        was made meanwhile counts as old afterwards: else all of it would be gone through at the end, as one young generation.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Switched off inside, and afterwards as it was before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # what somebody else has frozen stays so
                gc.freeze()
                gc.unfreeze()  # into the oldest generation
            gc.enable()
