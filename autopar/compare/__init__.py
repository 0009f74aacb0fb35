"""`autopar.compare`: which machine, and which method: one step on several of them, in one table.

In:     a step, its arguments or their types; clusters, which one need not own; methods; what a device costs, from the user.
Out:    `Comparison`, as text and as a page.
Method: `compare.py` plans, `row.py` holds what follows from a plan, `prices.py` reads the user's prices, `page.py` shows.
"""

from autopar.compare.compare import Comparison, compare

__all__ = ["Comparison", "compare"]
