"""`autopar.fit`: a training loop that survives failures, reports its progress, and is short enough to read.

In:     a step, the initial state, the batches.
Out:    the state after the last step, and the metrics of each step.
Method: `loop.py` is the loop, and resumes it; `batches.py` gives the batch of a step, ahead of time, `hosts.py` does so where
        each host reads its own portion (`portions.py`); `positions.py` restores the position of a loader, `remainder.py`
        handles a partial batch, `evaluate.py` runs the eval step, `reports.py` calls the loggers and draws the bar.
"""

from autopar.fit.loop import fit

__all__ = ["fit"]
