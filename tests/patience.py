"""Limits in tests, which must hold on a busy machine: no test passes or fails by how fast that is.

What is to come is waited for as long as anyone would, `PATIENCE_SECONDS`: it comes sooner. A limit that is to be hit, and
that something else must keep within, is a multiple of what that takes on this machine now: `several_times`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE_SECONDS = 600.0
"""Nothing that ends takes so long."""


def several_times(act: Callable[[], Any], least_seconds: float) -> float:
    """Ten times what this takes, or `least_seconds` if that is more."""
    begun = time.monotonic()
    act()
    return max(least_seconds, 10.0 * (time.monotonic() - begun))


def wait_until(is_so: Callable[[], Any], what: str) -> None:
    """Return when it is so."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < end, f"not within {PATIENCE_SECONDS:.0f} s: {what}"
        time.sleep(0.05)
