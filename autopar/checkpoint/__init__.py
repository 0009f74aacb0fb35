"""Checkpoints: save a state, restore it under any plan, on any number of devices, or with none of autopar.

In:     any pytree of arrays and numbers, wherever its arrays lie.
Out:    numbered folders, each one orbax checkpoint with a manifest; and the state back, each array where it is wanted.
Method: `owner.py` lets one process at a time write into a directory, `folder.py` names the folders and commits them by
        one rename, `manifest.py` tells a whole checkpoint from a damaged one, `leaves.py` says how each leaf is
        written, `storage.py` alone imports orbax.
"""

from autopar.checkpoint.folder import latest, steps
from autopar.checkpoint.owner import release
from autopar.checkpoint.restore import restore
from autopar.checkpoint.save import Saving, save

__all__ = ["Saving", "latest", "release", "restore", "save", "steps"]
