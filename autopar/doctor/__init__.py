"""`autopar doctor`: tests what this machine and cluster can do, and says how to fix what they cannot.

In:     nothing; the machine as it is.
Out:    one `Finding` per part, as a table or as JSON.
Method: `probe.py` tests each part in a process of its own, `child.py` ends it when it hangs, `findings.py` interprets the
        answers and prints them.
"""

from autopar.doctor.findings import examine

__all__ = ["examine"]
