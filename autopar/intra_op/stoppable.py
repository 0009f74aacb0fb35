"""Runs HiGHS so that Ctrl-C stops it.

In:     HiGHS, with a model.
Out:    the same, solved; or `KeyboardInterrupt` within a second or two, however much time the solver had left.
Method: the solver works in a thread of its own, for Python hears of Ctrl-C only where its main thread runs Python; a time
        limit of zero, set while it works, makes it end by itself.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import highspy

LOOK_SECONDS = 0.1
"""A main thread that waits hears of a signal at least so often, on every platform."""


def run_stoppable(highs: highspy.Highs) -> None:
    """Run the solver on the model that has been handed to it."""
    if threading.current_thread() is not threading.main_thread():
        highs.run()
        return
    worker = threading.Thread(target=highs.run, name="highs", daemon=True)
    worker.start()
    try:
        while worker.is_alive():
            worker.join(LOOK_SECONDS)
    except KeyboardInterrupt:
        highs.setOptionValue("time_limit", 0.0)
        worker.join()
        raise
