"""Saves a state: copies the arrays to the host, and writes them while the program continues.

In:     a pytree of arrays and numbers, a directory, the number of the step.
Out:    `Saving`, to wait on; in the end the complete folder `directory/step`.
Method: orbax writes into a workplace, and so do workers with the arrays that they hold; a thread waits for all, adds the
        manifest, renames, and removes checkpoints that are older than is to be kept. A save that fails warns at once, and
        raises its error in `wait()`, or else in the next save into its directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

import autopar.checkpoint.storage as storage
from autopar.checkpoint.apart import discard, take_apart
from autopar.checkpoint.folder import close_workplace, commit, open_workplace, prune, step_folder, step_number, steps
from autopar.checkpoint.leaves import LeafType, is_function, leaf_type, paths, spelled, storable
from autopar.checkpoint.manifest import NOTE, write_manifest
from autopar.errors import AutoparError, CheckpointError, DonatedError, WorkerError, check_number, listed
from autopar.frameworks import without_arrays
from autopar.ir.trace.containers import plain_containers
from autopar.runtime.failure import is_gone
from autopar.runtime.ray.driver.saves import Taken


def save(
    directory: str | os.PathLike,
    state: Any,
    step: int | None = None,
    *,
    keep: int | None = None,
    overwrite: bool = False,
) -> Saving:
    """Start to save a state, which may be donated or changed as soon as this returns.

    The folder `directory/step` is also a plain orbax checkpoint of the user's tree, with whole arrays. Workers of a Ray
    cluster write the arrays that they hold, if they see the directory; otherwise these go through this process, with a
    warning.

    Args:
        directory: The directory of all checkpoints of a training run; created if necessary.
        state: Any pytree of arrays, random keys and numbers. Functions among its leaves are not written. NNX objects are
            written as dicts of their arrays.
        step: The number of this checkpoint, 0 or more; None: one more than the newest.
        keep: How many of the newest checkpoints to keep, including this one; None: all.
        overwrite: Whether to replace a checkpoint of the same number.

    Returns:
        `Saving`. Wait for the last one before the program ends: Python 3.11 does so by itself, later versions cannot.

    Raises:
        DonatedError: An array was donated to a step.
        CheckpointError: There is a checkpoint of this number; a leaf cannot be written; orbax is not installed; another
            living process has saved into this directory (which it owns until it ends or calls `release`); or an earlier
            save into it failed, and nobody has waited for it.
        WorkerError: Workers failed before they had copied their arrays.
    """
    arrays, shell = without_arrays(state)
    if shell is not None and shell.adapter.updates_in_place:  # other objects are pytrees
        state = arrays
    return begin_save(directory, state, step, keep=keep, overwrite=overwrite)


def begin_save(
    directory: str | os.PathLike,
    state: Any,
    step: int | None,
    *,
    keep: int | None,
    overwrite: bool,
    note: Mapping[str, Any] | None = None,
) -> Saving:
    """`save`, with a note beside the state: JSON that a run needs when it resumes."""
    number = max(steps(directory), default=-1) + 1 if step is None else step_number(step)
    folder = step_folder(directory, number)
    _raise_failure(folder.parent)
    if keep is not None:
        check_number("save", "keep", keep, least=1, is_whole=True, kind=CheckpointError, path=str(folder))
    if folder.exists() and not overwrite:
        raise CheckpointError(
            "this checkpoint is there already.",
            given=str(folder),
            wrong="it would be lost.",
            do="save under another number or in another directory, or pass overwrite=True.",
            path=str(folder),
        )
    _check_there(state)
    types = {path: leaf_type(path, leaf) for path, leaf in paths(state)}
    workplace = open_workplace(directory)
    taken: dict[int, Taken] = {}
    try:
        taken |= take_apart(jax.tree.leaves(state), workplace)
        finish = storage.start_writing(_storable_tree(state, types, taken), workplace / "made")
    except BaseException:
        discard(taken.values())
        close_workplace(workplace)
        raise

    def work() -> None:
        try:
            known = finish()
            if note is not None:
                (workplace / "made" / NOTE).write_text(json.dumps(note), encoding="utf-8")
            write_manifest(workplace / "made", number, types, known)
            commit(workplace, folder)
            if keep is not None:
                prune(folder.parent, number, keep)
        except BaseException:
            close_workplace(workplace)
            raise

    return Saving(number, folder, work)


def _check_there(state: Any) -> None:
    gone = [spelled(path) for path, leaf in paths(state) if is_gone(leaf)]
    if gone:
        raise DonatedError(
            "an array of the state is no more.",
            given=listed(gone, 4),
            wrong="a step was given it and has taken its memory over for its results.",
            do="save what the last call returned.",
            paths=tuple(gone),
        )


def _storable_tree(state: Any, types: Mapping[tuple[str, ...], LeafType], taken: Mapping[int, Taken]) -> Any:
    kinds = iter(types.values())

    def written(leaf: Any) -> Any:
        return None if is_function(leaf) else storable(taken.get(id(leaf), leaf), next(kinds))

    return jax.tree.unflatten(plain_containers(state), map(written, jax.tree.leaves(state)))


def _raise_failure(directory: Path) -> None:
    """Raise the error of an earlier save into this directory that has not been raised yet."""
    for saving in _FAILED:
        if saving.path.parent == directory:
            saving.wait()


class Saving:
    """A checkpoint that is being written.

    Attributes:
        step: Its number.
        path: Its folder.
    """

    def __init__(self, step: int, path: Path, work: Any):
        self.step, self.path, self._work = step, path, work
        self._error: AutoparError | None = None
        self._thread = threading.Thread(target=self._run, name=f"autopar-save-{step}")
        self._thread.start()
        # At exit Python closes thread pools before it joins threads, and orbax cannot write without them.
        threading._register_atexit(_wait_at_exit, weakref.ref(self))  # type: ignore[attr-defined]

    def done(self) -> bool:
        """Whether it has ended, successfully or not."""
        return not self._thread.is_alive()

    def wait(self, timeout_seconds: float | None = None) -> Path:
        """Wait until the checkpoint is complete.

        Returns:
            Its folder.

        Raises:
            CheckpointError: It could not be written.
            TimeoutError: It is not done yet.
        """
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"checkpoint {self.path} is not written after {timeout_seconds} s")
        if self._error is not None:
            if self in _FAILED:
                _FAILED.remove(self)
            raise self._error
        return self.path

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = _failure(self.path, error)
            _FAILED.append(self)
            warnings.warn(str(self._error), stacklevel=2)

    def __repr__(self) -> str:
        state = "being written" if not self.done() else "failed" if self._error else "written"
        return f"Saving({str(self.path)!r}, {state})"


_FAILED: list[Saving] = []
"""Failed saves whose error has not been raised. Module state, since the program may keep no reference to them."""


def _failure(path: Path, error: BaseException) -> AutoparError:
    if isinstance(error, AutoparError) and not isinstance(error, WorkerError):
        return error
    wrong = f"{type(error).__name__}: {error}"
    if isinstance(error, WorkerError):
        do, wrong = "restore: the state that the worker held is lost with it", f"{error.given}: {error.wrong}"
    elif isinstance(error, OSError):
        do = "see to the disk, and save again"
    elif getattr(threading, "_SHUTTING_DOWN", False):
        # From Python 3.12 on no thread can be started while the program exits, and orbax needs some to commit.
        do = "call wait() on what checkpoint.save returns before the program ends"
    else:
        do = "mend what it names, and save again"
    failure = CheckpointError(
        "a checkpoint was NOT written.",
        given=str(path),
        wrong=wrong,
        do=f"{do}; earlier checkpoints are as they were.",
        path=str(path),
    )
    failure.__cause__ = error
    return failure


def _wait_at_exit(reference: weakref.ref[Saving]) -> None:
    saving = reference()
    if saving is not None:
        with contextlib.suppress(KeyboardInterrupt):
            saving._thread.join()
