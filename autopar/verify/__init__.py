"""Compares what XLA compiles of a plan, for devices that need not be there, with what the plan predicts.

In:     a plan that was made in this process, or attached to its step; the name of a device.
Out:    `Verification`: memory, collectives and what hides them, predicted and as compiled; as text and as a page.
Method: `targets.py` names devices, `verify.py` compiles every program for them, `hlo.py` reads what came of it,
        `schedule.py` follows it in order, `findings.py` compares and shows; `fitting.py` plans until it fits.
"""

from autopar.verify.findings import Verification
from autopar.verify.fitting import plan_that_fits
from autopar.verify.verify import verify_plan

__all__ = ["Verification", "plan_that_fits", "verify_plan"]
