"""Puts arguments in their places before a program, or the first programs of a pipeline, take them.

In:     where each is wanted, which are donated; the arrays of a call.
Out:    `Placing`: arrays that are there are passed on as they are, the others moved in one batched `device_put`.
Method: what is donated and moved, or shares its memory with another (`memory.py`), is copied first: the user's own array
        must survive. Nearly always all are where they were last time, which is looked at first.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar.runtime.failure import donated_error, is_gone
from autopar.runtime.memory import Ownership

_IS_DELETED = operator.methodcaller("is_deleted")


class Placing:
    """Puts the arguments of one step in their places.

    Attributes:
        shardings: Where each is wanted.
        was_as_passed: Whether the last ones were passed on as they are, save what JAX itself puts there in each call.
    """

    def __init__(self, step: str, paths: Sequence[str], types: Sequence[jax.ShapeDtypeStruct], donated: Sequence[bool]):
        """Nothing has been placed yet; constants, which come last, have no path."""
        self._step, self._paths, self._donated = step, paths, donated
        self.shardings: list[Any] = [t.sharding for t in types]
        # For each, the sharding object last found equal to what is wanted: comparing takes longer than looking.
        self._seen = list(self.shardings)
        kinds = [(t.sharding.shard_shape(t.shape), t.dtype, t.sharding.mesh) for t in types]
        self._ownership = Ownership(kinds, donated)
        self.was_as_passed = False

    def set_results(self, results: Iterable[jax.Array]) -> None:
        """As of `Ownership`."""
        self._ownership.set_results(results)

    def place(self, given: Sequence[Any], arrays: Sequence[Any] | None = None) -> list[jax.Array]:
        """The arrays in their places; `given` are the user's that they were made of, if they are others.

        Raises:
            DonatedError: One is no more.
        """
        placed = list(given if arrays is None else arrays)
        away = [] if self._are_there(placed) else self._away(placed)
        by_jax = all(not self._donated[k] and not isinstance(placed[k], jax.Array) for k in away)
        self._move(placed, away)
        shared = self._ownership.shared(given, placed, [k for k in away if self._donated[k]])
        self._move(placed, shared)
        self.was_as_passed = by_jax and not shared
        return placed

    def _are_there(self, arrays: list[Any]) -> bool:
        """Whether each array is where it was found in its place before, as in nearly all steps but the first."""
        try:
            return [array.sharding for array in arrays] == self._seen and not any(map(_IS_DELETED, arrays))
        except AttributeError:  # it is no array of JAX
            return False

    def _away(self, arrays: Sequence[Any]) -> list[int]:
        """Positions of arrays that are not where they are wanted."""
        seen, away = self._seen, []
        for k, array in enumerate(arrays):
            if isinstance(array, jax.Array):
                if array.is_deleted():  # JAX crashes on it where it has several devices
                    gone = [path for path, a in zip(self._paths, arrays, strict=False) if is_gone(a)]
                    raise donated_error(self._step, list(dict.fromkeys(gone)))
                sharding = array.sharding
                if sharding is seen[k]:
                    continue
                wanted = self.shardings[k]
                # An equivalent sharding by another name will do, but not for what is donated: it may be the user's own.
                if sharding == wanted or (not self._donated[k] and sharding.is_equivalent_to(wanted, array.ndim)):
                    seen[k] = sharding
                    continue
            away.append(k)
        return away

    def _move(self, placed: list[Any], away: Sequence[int]) -> None:
        if away:
            # `device_put` shares memory with the user's array where it can, also when told not to (a replica on the same
            # device; NumPy memory on CPU): what is donated is copied first.
            moved = jax.device_put(
                [copied(placed[k]) if self._donated[k] else placed[k] for k in away],
                [self.shardings[k] for k in away],
            )
            for k, array in zip(away, moved, strict=True):
                placed[k] = array


def copied(array: Any) -> Any:
    """The same values in memory of their own."""
    return jnp.array(array, copy=True) if isinstance(array, jax.Array) else np.array(array)
