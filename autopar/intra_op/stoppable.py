"""Runs HiGHS so that Ctrl-C stops it, and for so long as it works.

In:     HiGHS, with a model; seconds of work.
Out:    the same, solved, or as far as it came; or `KeyboardInterrupt` within a second or two, however much time was left.
Method: the solver works in a thread of its own, for Python hears of Ctrl-C only where its main thread runs Python; a time
        limit of zero, set while it works, makes it end by itself. HiGHS knows the clock only, which goes on while others
        have the processor.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from autopar.intra_op.time_limit import Work

if TYPE_CHECKING:
    import highspy

LOOK_SECONDS = 0.1
"""A main thread that waits hears of a signal at least so often, on every platform."""


def run_stoppable(highs: highspy.Highs, seconds: float) -> None:
    """Run the solver on the model that has been handed to it until it is done, or has worked for so many seconds."""
    worker, work = threading.Thread(target=highs.run, name="highs", daemon=True), Work()
    worker.start()
    try:
        while worker.is_alive():
            worker.join(LOOK_SECONDS)
            if work.seconds > seconds:
                break
    finally:
        if worker.is_alive():
            highs.setOptionValue("time_limit", 0.0)
            worker.join()
