"""`autopar doctor`: what this machine and cluster can do, and how to mend what they cannot.

In:     nothing; the machine as it is.
Out:    one `Finding` per part, as a table or as JSON.
Method: `probe.py` tries each part in a process of its own, `child.py` ends it when it hangs, `findings.py` says what the
        answers mean, and prints it.
"""

from autopar.doctor.findings import examine

__all__ = ["examine"]
