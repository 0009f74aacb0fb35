"""`autopar.compare`: which machine, and which method: one step on several of them, in one table.

In:     a step, its arguments or their types; clusters, which one need not own; methods; what a device costs, from the user.
Out:    `Comparison`, as text and as a page.
Method: `compare.py` plans and reads the user's prices, `comparison.py` holds what follows from the plans, and shows it.
"""

from autopar.compare.compare import compare
from autopar.compare.comparison import Comparison

__all__ = ["Comparison", "compare"]
