"""Treats a batch with fewer rows than the others: keeps, drops, pads or refuses it.

In:     a batch, the number of rows of a whole batch, the user's choice.
Out:    the batch, padded if wanted; or None, if it is dropped.
Method: rows are the leading dim that all arrays of a batch share. Padding repeats the last row, whose values are ordinary,
        and is 0 in the batch's mask; a batch without a mask cannot be padded, since the step would count the copies.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
import numpy as np

from autopar.errors import BatchError, check_choice

Remainder = Literal["keep", "drop", "pad", "error"]
MASK = "mask"


def check_remainder(remainder: Any) -> None:
    """Raises `AutoparError` for an unknown choice."""
    do = "drop it, pad it (the batch needs a mask), refuse it, or leave it out to plan the step for it, too."
    check_choice("fit", "remainder", remainder, get_args(Remainder), do=do)


def rows_of(batch: Any) -> int | None:
    """The leading dim that all arrays share; None: there is none."""
    lengths = {np.shape(leaf)[0]: None for leaf in jax.tree.leaves(batch) if np.ndim(leaf)}
    return next(iter(lengths)) if len(lengths) == 1 else None


def weight_of(batch: Any) -> float:
    """The weight of a batch in a mean over batches: the sum of its mask, or its number of rows."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if _is_mask(path):
            return float(np.sum(leaf))
    return float(rows_of(batch) or 1)


def whole(batch: Any, rows: int | None, remainder: Remainder, number: int) -> Any | None:
    """The batch of step `number` as the step gets it; None: it is dropped.

    `rows`: of a whole batch; None: not known, or batches have no rows.

    Raises `BatchError`: it is refused, or cannot be padded.
    """
    found = rows_of(batch)
    if remainder == "keep" or rows is None or found == rows:
        return batch
    if found is None or found > rows or remainder == "error":
        raise BatchError(
            "a batch has another number of rows than the first.",
            given=f"the batch of step {number}: {_shapes(batch)}",
            wrong=f"whole batches have {rows} rows.",
            do='let fit leave it out, remainder="drop"; or fill it up, remainder="pad", where the batch has a mask that '
            "the step weighs its rows by.",
            size=found,
        )
    return None if remainder == "drop" else _padded(batch, found, rows, number)


def _padded(batch: Any, found: int, rows: int, number: int) -> Any:
    leaves, tree = jax.tree_util.tree_flatten_with_path(batch)
    if not any(_is_mask(path) for path, _ in leaves):
        raise BatchError(
            "a partial batch cannot be padded without a mask.",
            given=f"the batch of step {number}: {_shapes(batch)}; whole ones have {rows} rows",
            wrong=f"no array in it is named {MASK!r}, so that the step would count the rows that are made up.",
            do=f'give every batch an array "{MASK}" of [rows, ...], true or 1 where it counts, and let the step weigh by it: '
            'jnp.sum(losses * mask) / jnp.sum(mask). Or remainder="drop".',
            size=found,
        )

    def padded(path: Any, leaf: Any) -> Any:
        if not np.ndim(leaf):
            return leaf
        leaf = np.asarray(leaf)
        more = np.zeros_like(leaf[:1]) if _is_mask(path) else leaf[-1:]
        return np.concatenate([leaf, np.repeat(more, rows - found, axis=0)])

    return tree.unflatten([padded(path, leaf) for path, leaf in leaves])


def _is_mask(path: Any) -> bool:
    key = path[-1] if path else None
    return MASK in (getattr(key, "key", None), getattr(key, "name", None))


def _shapes(batch: Any) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    return ", ".join(f"{jax.tree_util.keystr(path)} {list(np.shape(leaf))}" for path, leaf in leaves[:6])
