"""Finds arrays that a step is passed twice: what it overwrites must belong to one argument only.

In:     the arrays of each call, where the program wants them, and which of them are donated.
Out:    which of these must be copied before the call.
Method: two arguments can be one array, or two arrays over the same buffers (`device_put` to an equal sharding makes such).
        One array twice is seen by its identity. Reading addresses takes longer than starting a step, so they are compared
        only where an array is new here: no result of the step before, and not passed in the same place then.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any

import jax

from autopar._jax import buffer_addresses


def let_go(arrays: Iterable[Any], donated: Iterable[bool]) -> None:
    """Arrays whose memory a program has taken over hold nothing any more.

    JAX calls them deleted either way. But a function that was compiled for such an array before it was donated reads it
    all the same where it lies on several devices, and the process ends (jaxlib 0.10); of an array that is deleted by
    name it raises JAX's error.
    """
    for array, gone in zip(arrays, donated, strict=False):
        if gone and isinstance(array, jax.Array) and array.is_deleted():
            array.delete()


class Ownership:
    """Remembers which arrays are known to share no memory that is overwritten."""

    def __init__(self, types: Sequence[Hashable], donated: Sequence[bool]):
        """Nothing is known yet.

        Types of arguments are equal where two could have the same buffers: the type of one device's part, the mesh.
        """
        overwritten = {kind for kind, gone in zip(types, donated, strict=True) if gone}
        self._types = list(types)
        self._donated = list(donated)
        self._at_risk = [k for k, kind in enumerate(types) if kind in overwritten]
        self._donated_types: set[tuple[Any, ...]] = set()
        self._results: dict[int, weakref.ref[jax.Array]] = {}
        self._kept: dict[int, weakref.ref[jax.Array]] = {}

    def set_results(self, results: Iterable[jax.Array]) -> None:
        """These, of the latest step, share memory neither with each other nor with what was there before."""
        self._results = {id(array): weakref.ref(array) for array in results}

    def shared(self, given: Sequence[Any], placed: Sequence[jax.Array], copies: Collection[int]) -> list[int]:
        """Donated arguments whose memory another one has as well, save one where only donated ones have it.

        Arguments are `given` by the user, and `placed` where the program wants them, some donated ones as `copies`.
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
        """Donated arguments over the memory of one that is only read and was moved for that: the user still has it."""
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
