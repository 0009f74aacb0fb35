"""`autopar.compare`: compares machines and methods for one step, in one table.

In:     a step, its arguments or their types; clusters, which one need not own; methods; the user's prices of devices.
Out:    `Comparison`, as text and as a page.
Method: `compare.py` plans and reads the prices, `comparison.py` derives the figures and shows them.
"""

from autopar.compare.compare import compare
from autopar.compare.comparison import Comparison

__all__ = ["Comparison", "compare"]
