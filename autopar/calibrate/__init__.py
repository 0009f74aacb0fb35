"""`autopar.calibrate`: measure the machine at hand, and fit to it the few parameters that plans are made with.

In:     devices of one host; a time budget.
Out:    `MachineProfile` (`mesh/machine_profile.py`), which `Cluster.local(profile=...)` and the others take.
Method: `cases.py` and `blocks.py` say what is measured, `timing.py` measures, `fit.py` fits, and `calibrate.py` holds them
        together.
"""

from autopar.calibrate.calibrate import calibrate

__all__ = ["calibrate"]
