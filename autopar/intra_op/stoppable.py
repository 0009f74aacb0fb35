"""Runs HiGHS interruptibly, with a limit on processor time.

In:     HiGHS, with a model; seconds of work.
Out:    the same, solved or stopped; or `KeyboardInterrupt` within a second or two of Ctrl-C.
Method: the solver runs in a thread of its own, since Python handles Ctrl-C only while its main thread runs Python; setting
        its time limit to zero makes it end by itself. HiGHS's own limit is one of wall-clock time, which passes while
        others have the processor.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from autopar.intra_op.time_limit import Work

if TYPE_CHECKING:
    import highspy

LOOK_SECONDS = 0.1
"""Interval at which the waiting main thread handles signals, on every platform."""


def run_stoppable(highs: highspy.Highs, seconds: float) -> None:
    """Run the solver on its model until it is done, or has worked for so many seconds."""
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
