"""`autopar.fit`: a training loop that survives, tells how it goes, and stays short enough to read.

In:     a step, the state to begin with, the batches.
Out:    the state after the last step, and what each step returned besides.
Method: `loop.py` is the loop and its going on after a break; `batches.py` gives the batch of a step, ahead of time,
        `hosts.py` where each host reads its own portion (`portions.py`); `positions.py` lets a loader go on where it was,
        `remainder.py` says what becomes of a partial batch, `evaluate.py` runs the eval step, `reports.py` tells the loggers
        (`loggers.py`) and the bar (`reports.py`).
"""

from autopar.fit.loop import fit

__all__ = ["fit"]
