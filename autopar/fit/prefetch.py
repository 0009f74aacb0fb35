"""Moves batches to the devices ahead of time, while these still work on the batch before.

In:     the step, as it was last compiled; a batch in host memory.
Out:    the same batch, its arrays in the shardings of the step, perhaps still in transit.
Method: a batch of the same types as the last one is placed in the same shardings. The step itself moves what is not a NumPy
        array, or would change its dtype, or is for workers, or is donated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from autopar.ir.trace.state import argument_slices
from autopar.step import ParallelStep


def placed_for(step: Any, last: Any) -> Callable[[Any], Any]:
    """A function that starts to move a batch like `last` to where the step wants it; the identity if that is not known."""
    compiled = step.latest() if isinstance(step, ParallelStep) else None
    if compiled is None or compiled.executable.is_remote:
        return lambda batch: batch
    program, tree = compiled.program, jax.tree.structure(last)
    arguments = program.in_tree.children()[0].children()
    if not arguments or arguments[-1] != tree:
        return lambda batch: batch
    first, stop = argument_slices(program)[len(arguments) - 1]
    if any(compiled.plan.attached.roles.donated[first:stop]):  # a placed array may share memory with the user's
        return lambda batch: batch
    shardings = jax.tree.leaves(compiled.in_shardings, is_leaf=lambda sharding: sharding is None)[first:stop]
    types = [_type_of(leaf) for leaf in jax.tree.leaves(last)]
    if [aval.shape for aval in program.in_avals[first:stop]] != [shape for shape, _ in types]:
        return lambda batch: batch  # it was compiled last for other batches

    def place(batch: Any) -> Any:
        leaves, found = jax.tree.flatten(batch)
        if found != tree or [_type_of(leaf) for leaf in leaves] != types:
            return batch
        moved = [
            k
            for k, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True))
            if isinstance(leaf, np.ndarray)
            and isinstance(sharding, jax.sharding.Sharding)
            and jax.dtypes.canonicalize_dtype(leaf.dtype) == leaf.dtype
        ]
        arrays = jax.device_put([leaves[k] for k in moved], [shardings[k] for k in moved])
        for k, array in zip(moved, arrays, strict=True):
            leaves[k] = array
        return tree.unflatten(leaves)

    return place


def _type_of(leaf: Any) -> Any:
    return np.shape(leaf), getattr(leaf, "dtype", type(leaf))
