"""What a step returned, as numbers with names.

In:     metrics, any pytree.
Out:    `{"loss": 0.25, "grads/norm": 1.5}`.
Method: a scalar is named by its path, one without a path `loss`: it is what nearly every step returns alone.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from autopar._jax import is_key


def scalars_of(metrics: Any) -> dict[str, float]:
    """Every scalar among the metrics; waits for them."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(metrics):
        if not is_key(leaf) and np.size(leaf) == 1 and np.ndim(leaf) == 0:
            value = np.asarray(leaf)
            if np.issubdtype(value.dtype, np.number) or value.dtype == bool or value.dtype.kind == "V":
                found[_name(path) or "loss"] = float(value)
    return found


def _name(path: Any) -> str:
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
