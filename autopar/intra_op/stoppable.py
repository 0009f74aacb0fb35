"""HiGHS that Ctrl-C stops.

In:     a PuLP model.
Out:    the same model solved; or `KeyboardInterrupt` within a second or two, however much time the solver had left.
Method: the solver works in a thread of its own, for Python hears of Ctrl-C only where its main thread runs Python; a time
        limit of zero, set while it works, makes it end by itself.
"""

from __future__ import annotations

import threading
from typing import Any

import pulp

LOOK_SECONDS = 0.1
"""A main thread that waits hears of a signal at least so often, on every platform."""


class StoppableHiGHS(pulp.HiGHS):
    """PuLP's HiGHS; only how it is waited for differs."""

    def callSolver(self, lp: Any) -> None:
        """Run the solver on a model that has been handed to it."""
        if threading.current_thread() is not threading.main_thread():
            lp.solverModel.run()
            return
        worker = threading.Thread(target=lp.solverModel.run, name="highs", daemon=True)
        worker.start()
        try:
            while worker.is_alive():
                worker.join(LOOK_SECONDS)
        except KeyboardInterrupt:
            lp.solverModel.setOptionValue("time_limit", 0.0)
            worker.join()
            raise
