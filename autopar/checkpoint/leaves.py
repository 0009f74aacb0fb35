"""Determines the type and path of each leaf of a state, and the value that is written for it.

In:     a pytree of arrays, random keys, Python numbers; or of their types.
Out:    `LeafType` per path, which the manifest records; values that orbax can write.
Method: arrays are written as they are, in any sharding. What orbax does not support is converted: keys to their integers,
        parts on several meshes to one array, dtypes that TensorStore lacks to bytes. Arrays without elements are only in the
        manifest. Functions are part of the program, not of the state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath

from autopar._jax import is_key, key_data, key_impl_name
from autopar.errors import CheckpointError
from autopar.plan.words import type_text
from autopar.runtime.ray.driver.saves import Taken

NumberKind = Literal["bool", "int", "float", "complex"]
NUMBERS: dict[NumberKind, type] = {"bool": bool, "int": int, "float": float, "complex": complex}


@dataclass(frozen=True, slots=True)
class LeafType:
    """The type of a leaf.

    Attributes:
        kind: `"array"`, `"key"` (typed random keys), or the name of a Python number's class.
        shape: The shape of the whole array.
        dtype: The name of the dtype; for keys, the name of their generator; for a Python number "".
    """

    kind: Literal["array", "key"] | NumberKind
    shape: tuple[int, ...] = ()
    dtype: str = ""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        if self.kind in NUMBERS:
            return f"Python {self.kind}"
        name = f"key<{self.dtype}>" if self.kind == "key" else self.dtype
        return type_text(self.shape, name)


def paths(tree: Any) -> list[tuple[tuple[str, ...], Any]]:
    """Each leaf of the state with its path, without functions.

    Raises `CheckpointError`: two paths have the same name on disk.
    """
    found: list[tuple[tuple[str, ...], Any]] = []
    names: dict[str, tuple[str, ...]] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        path = path_of(keys)
        other = names.setdefault(".".join(path), path)
        if other is not path:
            raise CheckpointError(
                "two leaves have one name.",
                given=f"{other} and {path}",
                wrong=f"both would be written as {'.'.join(path)!r}.",
                do="rename a key: in a checkpoint the parts of a path are joined by dots.",
                path=spelled(path),
            )
        if not is_function(leaf):
            found.append((path, leaf))
    return found


def path_of(keys: KeyPath) -> tuple[str, ...]:
    """The path of a leaf as a checkpoint has it: the names of its keys."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)


def spelled(path: tuple[str, ...]) -> str:
    """A path as text for messages."""
    return "/".join(path) or "the state itself"


def is_function(leaf: Any) -> bool:
    """Whether a leaf is a function, such as an activation function in an Equinox module."""
    return callable(leaf) and not hasattr(leaf, "dtype")


def leaf_type(path: tuple[str, ...], leaf: Any) -> LeafType:
    """The type of a leaf.

    Raises `CheckpointError`: it is neither an array of numbers nor a number of at most 64 bits.
    """
    for name, number in NUMBERS.items():  # bool before int, since a bool is an int
        if isinstance(leaf, number) and not isinstance(leaf, np.generic):
            if isinstance(leaf, int) and not -(2**63) <= leaf < 2**64:
                raise _unwritable(path, f"an int of {leaf.bit_length()} bits", "it does not fit in 64 bits.")
            return LeafType(name)
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise _unwritable(path, repr(leaf), f"it is of type {type(leaf).__name__}.")
    shape = tuple(int(n) for n in leaf.shape)
    if is_key(leaf):
        return LeafType("key", shape, key_impl_name(leaf))
    dtype = np.dtype(leaf.dtype)
    if dtype.hasobject or not _is_dtype(dtype.name):
        raise _unwritable(path, f"an array of dtype {dtype}", "its elements are no numbers.")
    return LeafType("array", shape, dtype.name)


def _is_dtype(name: str) -> bool:
    """Whether NumPy finds the dtype by this name, which restoring requires; not so for text and records."""
    try:
        np.dtype(name)
    except TypeError:
        return False
    return True


def _unwritable(path: tuple[str, ...], given: str, wrong: str) -> CheckpointError:
    return CheckpointError(
        "only arrays and numbers can be in a checkpoint.",
        given=f"{spelled(path)}: {given}",
        wrong=wrong,
        do="keep it out of the pytree: a static field, or what eqx.partition leaves over.",
        path=spelled(path),
    )


def knows_dtype(name: str) -> bool:
    """Whether TensorStore can write elements of this type."""
    import tensorstore

    try:
        tensorstore.dtype(name)
    except (TypeError, ValueError):
        return False
    return True


def storable(leaf: Any, kind: LeafType) -> Any:
    """The value that orbax writes for a leaf of this type; a `Taken` array, which workers write, stays as it is."""
    if kind.size == 0:
        return None
    if kind.kind == "key":
        return key_data(leaf)
    if kind.kind == "complex":
        return np.asarray(leaf)
    if kind.kind in NUMBERS:
        return leaf
    if isinstance(leaf, Taken):
        return leaf
    if not knows_dtype(kind.dtype):
        return np.atleast_1d(leaf).view(np.uint8)
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)


def written_shape(kind: LeafType) -> tuple[int, ...]:
    """The shape on disk: keys have a trailing dim of integers."""
    if kind.kind != "key":
        return kind.shape
    return (*kind.shape, *jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=kind.dtype))).shape)


def fits(asked: LeafType, saved: LeafType) -> bool:
    """Whether a leaf can be restored as the type asked for: the same type, or a number for a scalar array and vice versa."""
    if asked == saved:
        return True
    if not (asked.kind in NUMBERS or saved.kind in NUMBERS) or asked.shape or saved.shape:
        return False
    return _number_class(asked) == _number_class(saved)


def _number_class(kind: LeafType) -> str:
    if kind.kind != "array":
        return kind.kind
    dtype = np.dtype(kind.dtype)
    classes = {"bool": np.bool_, "int": np.integer, "float": np.floating, "complex": np.complexfloating}
    return next((name for name, abstract in classes.items() if jnp.issubdtype(dtype, abstract)), kind.dtype)
