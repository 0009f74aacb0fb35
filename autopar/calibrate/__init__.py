"""`autopar.calibrate`: measures the present machine, and fits the parameters of the cost model to it.

In:     devices of one host; a time budget.
Out:    `MachineProfile` (`mesh/machine_profile.py`), which `Cluster.local(profile=...)` and the others take.
Method: `cases.py` and `blocks.py` define the cases, `timing.py` measures them, `fit.py` fits; `calibrate.py` is the driver.
"""

from autopar.calibrate.calibrate import calibrate

__all__ = ["calibrate"]
