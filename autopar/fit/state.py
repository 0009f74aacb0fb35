"""What a step returned: the state and the metrics, their leaves as the loop, a checkpoint and the host have them.

In:     what a step returned; leaves.
Out:    the state and the metrics; leaves; metrics as numbers with names, `{"loss": 0.25, "grads/norm": 1.5}`.
Method: a scalar is named by its path, one without a path `loss`: it is what nearly every step returns alone.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar._jax import is_key
from autopar.errors import StructureChangedError


def parts_of(result: Any, like: Any) -> tuple[Any, Any]:
    """The state and the metrics in what a step returned."""
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
    """What a step is planned for of a leaf."""
    leaf = as_array(leaf)
    if not hasattr(leaf, "dtype"):
        return leaf  # a function, part of the program; what else is no array, the step or the checkpoint refuses
    sharding = leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak)


def weak_as(leaf: Any, like: Any) -> Any:
    """A Python number that became an array stays as weakly typed as it was, or another program would be traced."""
    if not getattr(like, "weak_type", False) or leaf.ndim:
        return leaf
    weak = jnp.asarray(np.asarray(leaf).item())
    return jax.device_put(weak, leaf.sharding) if getattr(leaf, "committed", False) else weak


def as_array(leaf: Any) -> Any:
    """Numbers become arrays; what else there is stays."""
    return jnp.asarray(leaf) if isinstance(leaf, bool | int | float | complex | np.ndarray | np.generic) else leaf


def on_host(leaf: Any) -> Any:
    """As NumPy has it; keys stay keys."""
    return leaf if is_key(leaf) else np.asarray(leaf)


def scalars_of(metrics: Any) -> dict[str, float]:
    """Every scalar among the metrics; waits for them."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(metrics):
        if not is_key(leaf) and np.size(leaf) == 1 and np.ndim(leaf) == 0:
            value = np.asarray(leaf)
            if np.issubdtype(value.dtype, np.number) or value.dtype == bool or value.dtype.kind == "V":
                found[jax.tree_util.keystr(path, simple=True, separator="/") or "loss"] = float(value)
    return found
