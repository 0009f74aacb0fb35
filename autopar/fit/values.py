"""What a step returned, as numbers with names; and how much was in its batch.

In:     metrics, any pytree; a batch.
Out:    `{"loss": 0.25, "grads/norm": 1.5}`; 4096 tokens, or 32 samples.
Method: a scalar is named by its path, one without a path `loss`: it is what nearly every step returns alone.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from autopar._jax import is_key
from autopar.fit.remainder import rows_of


def scalars_of(metrics: Any) -> dict[str, float]:
    """Every scalar among the metrics; waits for them."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(metrics):
        if not is_key(leaf) and np.size(leaf) == 1 and np.ndim(leaf) == 0:
            value = np.asarray(leaf)
            if np.issubdtype(value.dtype, np.number) or value.dtype == bool or value.dtype.kind == "V":
                found[_name(path) or "loss"] = float(value)
    return found


def amount_of(batch: Any) -> tuple[int, str]:
    """How much there is to learn in a batch: tokens where it has a matrix of integers, else samples."""
    for leaf in jax.tree.leaves(batch):
        if np.ndim(leaf) == 2 and np.issubdtype(getattr(leaf, "dtype", object), np.integer):
            return int(np.size(leaf)), "tokens"
    return rows_of(batch) or 0, "samples"


def _name(path: Any) -> str:
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
