"""Compiles a plan with XLA, for devices that need not be present, and compares the result with the plan's predictions.

In:     a plan that was made in this process, or attached to its step; the name of a device.
Out:    `Verification`: memory, collectives and their overlap, predicted and as compiled; as text and as a page.
Method: `targets.py` describes devices, `verify.py` compiles every program for them, `hlo.py` parses the compiled text,
        `schedule.py` simulates it in order, `findings.py` compares and shows; `fitting.py` plans until the plan fits.
"""

from autopar.verify.findings import Verification
from autopar.verify.fitting import plan_that_fits
from autopar.verify.verify import verify_plan

__all__ = ["Verification", "plan_that_fits", "verify_plan"]
