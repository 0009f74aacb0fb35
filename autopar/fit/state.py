"""Splits the result of a step into state and metrics, and converts their leaves.

In:     the result of a step; leaves.
Out:    the state and the metrics; converted leaves; metrics as named numbers, `{"loss": 0.25, "grads/norm": 1.5}`.
Method: a scalar is named by its path; one without a path is named `loss`, since most steps return it alone.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar._jax import is_key
from autopar.errors import StructureChangedError


def parts_of(result: Any, like: Any) -> tuple[Any, Any]:
    """The state and the metrics in the result of a step; `like`: has the structure of the state."""
    tree = jax.tree.structure(like)
    if jax.tree.structure(result) == tree:
        return result, None
    if isinstance(result, tuple) and len(result) > 1 and jax.tree.structure(result[0]) == tree:
        return result[0], result[1] if len(result) == 2 else result[1:]
    raise StructureChangedError(
        "fit cannot tell the state in what the step returned.",
        given=f"{jax.tree.structure(result)}",
        wrong=f"neither it nor the first of its parts has the structure of the state, {tree}.",
        do="let the step take (state, batch) and return (state, metrics): put what is trained into one pytree.",
    )


def type_of(leaf: Any) -> Any:
    """The type of a leaf for which a step is planned."""
    leaf = as_array(leaf)
    if not hasattr(leaf, "dtype"):
        return leaf  # a function, part of the program; other objects are refused by the step or the checkpoint
    sharding = leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak)


def as_array(leaf: Any) -> Any:
    """The leaf as a JAX array, if it is a number or a NumPy array."""
    return jnp.asarray(leaf) if isinstance(leaf, bool | int | float | complex | np.ndarray | np.generic) else leaf


def on_host(leaf: Any) -> Any:
    """The leaf as a NumPy array; keys stay keys."""
    return leaf if is_key(leaf) else np.asarray(leaf)


def scalars_of(metrics: Any) -> dict[str, float]:
    """All scalars among the metrics, by name; waits for them."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(metrics):
        if not is_key(leaf) and np.size(leaf) == 1 and np.ndim(leaf) == 0:
            value = np.asarray(leaf)
            if np.issubdtype(value.dtype, np.number) or value.dtype == bool or value.dtype.kind == "V":
                found[jax.tree_util.keystr(path, simple=True, separator="/") or "loss"] = float(value)
    return found
