"""Restores a state: reads each array directly into its wanted sharding.

In:     a directory of checkpoints, the wanted pytree, perhaps a compiled step that determines shardings.
Out:    the state, in the classes of that pytree.
Method: the checkpoint is verified file by file, its leaves are compared with those wanted, then orbax reads the part of each
        device, and workers read what they will hold. A stack whose parts differ in shape is read whole on the host.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autopar.checkpoint.storage as storage
from autopar._jax import is_key, shaped, weakly_typed
from autopar.checkpoint.apart import read_apart
from autopar.checkpoint.folder import check, step_folder, step_number, steps
from autopar.checkpoint.leaves import (
    NUMBERS,
    LeafType,
    fits,
    is_function,
    knows_dtype,
    leaf_type,
    paths,
    spelled,
    written_shape,
)
from autopar.checkpoint.manifest import Manifest
from autopar.checkpoint.places import UNCOMMITTED, OnWorkers, Place, place_by_like, places_by_plan
from autopar.compiled import CompiledStep
from autopar.errors import CheckpointError, listed, warn
from autopar.frameworks import without_arrays
from autopar.runtime.stacks import Stack
from autopar.step import ParallelStep


def restore(
    directory: str | os.PathLike,
    like: Any,
    step: int | None = None,
    compiled: CompiledStep | ParallelStep | None = None,
    *,
    partial: bool = False,
) -> Any:
    """Restore a state under any plan, on any devices.

    Args:
        directory: The directory of the checkpoints.
        like: The state's structure; leaves are arrays, numbers or `jax.ShapeDtypeStruct`s. NumPy leaves are restored as
            NumPy arrays, JAX leaves with the sharding of `like`, types without a sharding on the default device. Functions
            are taken from `like`.
        step: The number of the checkpoint; None: the newest that is not damaged, with a warning for each newer one.
        compiled: A step whose plan determines the sharding of each array; `like` is then one of its arguments, or a
            tuple, list or dict of several.
        partial: Whether `like` may be a part of what was saved, such as the parameters of a train state.

    Returns:
        The state; for NNX objects new objects, `like` stays unchanged.

    Raises:
        CheckpointError: There is no such checkpoint, it is damaged, or it has other leaves than `like`.
    """
    arrays, shell = without_arrays(like)
    if shell is None or not shell.adapter.updates_in_place:
        return read_state(directory, find_checkpoint(directory, step), like, compiled, partial=partial)
    return shell.around(read_state(directory, find_checkpoint(directory, step), arrays, compiled, partial=partial))


def read_state(
    directory: str | os.PathLike,
    manifest: Manifest,
    like: Any,
    compiled: CompiledStep | ParallelStep | None = None,
    *,
    partial: bool = False,
) -> Any:
    """`restore` for a checkpoint that was verified."""
    folder = step_folder(directory, manifest.step)
    leaves, tree = jax.tree.flatten(like)
    asked = {path: leaf_type(path, leaf) for path, leaf in paths(like)}
    _compare(asked, manifest, partial, str(folder))
    places = [*map(place_by_like, leaves)] if compiled is None else places_by_plan(like, compiled)
    positions = (k for k, leaf in enumerate(leaves) if not is_function(leaf))
    wanted = [
        _Wanted(k, path, kind, manifest.leaves[path], places[k])
        for k, (path, kind) in zip(positions, asked.items(), strict=True)
    ]
    theirs = {w.position: (w.place, w.path) for w in wanted if isinstance(w.place, OnWorkers) and w.is_plain}
    remote = read_apart(theirs, folder)
    here = [w for w in wanted if w.position not in remote and w.saved.size]
    found = storage.read(folder, {w.path: _request(w.saved, w.place) for w in here})
    for w in wanted:
        k = w.position
        value = remote[k] if k in remote else _placed(_value(found.get(w.path), w.saved), w.saved, w.asked, w.place)
        leaves[k] = _weak_as(leaves[k], value)
    return tree.unflatten(leaves)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A wanted leaf: its position among the leaves of `like`, path, type asked for, type saved, and place."""

    position: int
    path: tuple[str, ...]
    asked: LeafType
    saved: LeafType
    place: Place

    @property
    def is_plain(self) -> bool:
        """Whether workers can read it: an array that needs no conversion."""
        return self.saved == self.asked and self.saved.kind == "array" and self.saved.size > 0


def find_checkpoint(directory: str | os.PathLike, step: int | None = None) -> Manifest:
    """The manifest of a step's checkpoint; None: of the newest that is not damaged, with a warning for each newer one.

    Raises `CheckpointError`: there is none, or the one asked for is damaged.
    """
    step = None if step is None else step_number(step)
    there = steps(directory)
    if not there or (step is not None and step not in there):
        raise CheckpointError(
            "there is no checkpoint." if step is None else f"there is no checkpoint of step {step}.",
            given=str(directory),
            wrong=f"the steps in it are {', '.join(map(str, there))}." if there else "no step is in it.",
            do="pass the directory that autopar.checkpoint.save was given, and a step that is in it.",
            path=str(directory),
        )
    bad: list[str] = []
    for number in [step] if step is not None else reversed(there):
        found = check(directory, number)
        if isinstance(found, Manifest):
            for line in bad:
                warn(f"{line}. Restoring step {number}, the newest that is whole.")
            return found
        bad.append(f"checkpoint {step_folder(directory, number)} is damaged: {found}")
    raise CheckpointError(
        "the checkpoint is damaged." if step is not None else "no checkpoint is whole.",
        given=str(directory),
        wrong="\n".join(bad),
        do=f"restore another step of {there}." if len(there) > 1 and step is not None else "start anew.",
        path=str(directory),
    )


def _compare(wanted: dict[tuple[str, ...], LeafType], manifest: Manifest, partial: bool, folder: str) -> None:
    saved = manifest.leaves
    lines = []
    for path in [*saved, *(p for p in wanted if p not in saved)]:
        if path not in wanted:
            if not partial:
                lines.append((path, f"{saved[path]} in the checkpoint, not asked for"))
        elif path not in saved:
            lines.append((path, f"not in the checkpoint, asked for as {wanted[path]}"))
        elif not fits(wanted[path], saved[path]):
            lines.append((path, f"{saved[path]} in the checkpoint, asked for as {wanted[path]}"))
    if not lines:
        return
    unread = all(path not in wanted for path, _ in lines)
    raise CheckpointError(
        "the checkpoint holds another state.",
        given=folder,
        wrong=listed([f"{spelled(path)}: {text}" for path, text in lines], 8, "\n"),
        do="pass partial=True to read only what is asked for."
        if unread
        else "pass `like` with the leaves that were saved, and convert them afterwards.",
        path=spelled(lines[0][0]),
    )


def _request(kind: LeafType, place: Place) -> Any:
    """The request to orbax for a leaf."""
    if kind.kind in ("bool", "int", "float"):
        return NUMBERS[kind.kind]
    dtype = {"key": "uint32", "complex": "complex128"}.get(kind.kind, kind.dtype)
    direct = isinstance(place, jax.sharding.Sharding) and kind.kind != "complex" and knows_dtype(dtype)
    if not knows_dtype(dtype):
        dtype = "uint8"
    return jax.ShapeDtypeStruct(written_shape(kind), dtype, sharding=place if direct else None)


def _value(found: Any, kind: LeafType) -> Any:
    """The saved value of a leaf; a random key still as integers."""
    if kind.size == 0:
        return np.zeros(written_shape(kind), "uint32" if kind.kind == "key" else kind.dtype)
    if kind.kind in NUMBERS:
        return NUMBERS[kind.kind](found.item() if kind.kind == "complex" else found)
    if isinstance(found, np.ndarray) and kind.kind == "array" and found.dtype.name != kind.dtype:
        return found.view(kind.dtype).reshape(kind.shape)
    return found


def _placed(value: Any, kind: LeafType, asked: LeafType, place: Place) -> Any:
    if asked.kind in NUMBERS and kind.kind in NUMBERS:
        return value
    if kind.kind in NUMBERS:
        value = np.asarray(value, asked.dtype)
    if place is UNCOMMITTED:
        value = jnp.asarray(value)
    elif isinstance(place, Stack):
        value = place.place(value)
    elif isinstance(place, jax.sharding.Sharding) and not isinstance(value, jax.Array):
        value = jax.device_put(value, place)
    if kind.kind == "key":
        return jax.random.wrap_key_data(jnp.asarray(value), impl=kind.dtype)
    return value


def _weak_as(like: Any, value: Any) -> Any:
    """The value with the weak type of `like`, so that the step is not traced again."""
    if isinstance(value, tuple(NUMBERS.values())) or is_key(value):
        return value
    aval = shaped(like)
    if not aval.weak_type or aval.dtype != value.dtype:
        return value
    return value.item() if isinstance(value, np.ndarray | np.generic) else weakly_typed(value)
