"""Checkpoints: saves a state, and restores it under any plan, on any number of devices, or without autopar.

In:     any pytree of arrays and numbers, in any sharding.
Out:    numbered folders, each an orbax checkpoint with a manifest; and the state again, each array in the wanted sharding.
Method: `owner.py` lets one process at a time write into a directory, `folder.py` names the folders and commits them by one
        rename, `manifest.py` detects damaged checkpoints, `leaves.py` determines how each leaf is written, and `storage.py`
        alone imports orbax.
"""

from autopar.checkpoint.folder import latest, steps
from autopar.checkpoint.owner import release
from autopar.checkpoint.restore import restore
from autopar.checkpoint.save import Saving, save

__all__ = ["Saving", "latest", "release", "restore", "save", "steps"]
