"""Finds donated arguments that share memory with another argument, which must be copied before the call.

In:     the arrays of each call, as given and as placed, and which arguments are donated.
Out:    the arguments to copy.
Method: two arguments can be the same array, or two arrays over the same buffers (`device_put` to an equal sharding makes
        such). The same array is recognized by identity. Reading buffer addresses takes longer than starting a step, so they
        are compared only for arrays that are new: neither a result of the step before, nor passed in the same place then.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any

import jax

from autopar._jax import buffer_addresses


def let_go(arrays: Iterable[Any], donated: Iterable[bool]) -> None:
    """Delete arrays that were donated.

    JAX calls them deleted in any case. But a function that was compiled for such an array before it was donated reads it
    all the same if it is on several devices, and the process crashes (jaxlib 0.10); for an array that was deleted
    explicitly it raises JAX's error.
    """
    for array, gone in zip(arrays, donated, strict=False):
        if gone and isinstance(array, jax.Array) and array.is_deleted():
            array.delete()


class Ownership:
    """Remembers which arrays are known to share no donated memory."""

    def __init__(self, types: Sequence[Hashable], donated: Sequence[bool]):
        """`types` of arguments are equal if the arguments could have the same buffers: shard shape, dtype and mesh."""
        overwritten = {kind for kind, gone in zip(types, donated, strict=True) if gone}
        self._types = list(types)
        self._donated = list(donated)
        self._at_risk = [k for k, kind in enumerate(types) if kind in overwritten]
        self._donated_types: set[tuple[Any, ...]] = set()
        self._results: dict[int, weakref.ref[jax.Array]] = {}
        self._kept: dict[int, weakref.ref[jax.Array]] = {}

    def set_results(self, results: Iterable[jax.Array]) -> None:
        """Remember the results of the latest step, which share memory neither with each other nor with older arrays."""
        self._results = {id(array): weakref.ref(array) for array in results}

    def shared(self, given: Sequence[Any], placed: Sequence[jax.Array], copies: Collection[int]) -> list[int]:
        """Donated arguments that share memory with another argument; if only donated ones share it, all but one of them.

        `given`: the user's arrays. `placed`: the arrays for the program. `copies`: donated ones that are copies already.
        """
        twice = self._passed_twice(given, copies)
        twice += self._under_moved(given, placed, {*twice, *copies})
        apart = {*twice, *copies}
        doubtful = [k for k in self._at_risk if k not in apart and not self._is_known(k, placed[k])]
        if not doubtful:
            return twice
        types = {self._types[k] for k in doubtful}
        return twice + self._overlapping(
            placed, [k for k in self._at_risk if k not in apart and self._types[k] in types]
        )

    def _passed_twice(self, given: Sequence[Any], copies: Collection[int]) -> list[int]:
        if len(set(map(id, given))) == len(given):
            return []
        seen = {id(array) for array, gone in zip(given, self._donated, strict=True) if not gone}
        twice = []
        for k, array in enumerate(given):
            if self._donated[k] and k not in copies:
                if id(array) in seen:
                    twice.append(k)
                seen.add(id(array))
        return twice

    def _under_moved(self, given: Sequence[Any], placed: Sequence[jax.Array], apart: Collection[int]) -> list[int]:
        """Donated arguments that share memory with the user's array of an argument that was moved and is not donated."""
        if all(map(operator.is_, given, placed)):
            return []
        pairs = enumerate(zip(given, placed, strict=True))
        moved = [a for k, (a, b) in pairs if a is not b and not self._donated[k] and isinstance(a, jax.Array)]
        if not moved:
            return []
        donated = [k for k, gone in enumerate(self._donated) if gone]
        self._donated_types = self._donated_types or {(placed[k].shape, placed[k].dtype) for k in donated}
        alike = [array for array in moved if (array.shape, array.dtype) in self._donated_types]
        taken = {at for array in alike for at in buffer_addresses(array)}
        return [k for k in donated if taken and k not in apart and not taken.isdisjoint(buffer_addresses(placed[k]))]

    def _is_known(self, k: int, array: jax.Array) -> bool:
        known = self._results.get(id(array))
        if known is not None and known() is array:
            return True
        if self._donated[k]:
            return False
        known, self._kept[k] = self._kept.get(k), weakref.ref(array)
        return known is not None and known() is array

    def _overlapping(self, arrays: Sequence[jax.Array], positions: Sequence[int]) -> list[int]:
        taken = {at for k in positions if not self._donated[k] for at in buffer_addresses(arrays[k])}
        found = []
        for k in positions:
            if self._donated[k]:
                own = buffer_addresses(arrays[k])
                if not taken.isdisjoint(own):
                    found.append(k)
                taken.update(own)
        return found
