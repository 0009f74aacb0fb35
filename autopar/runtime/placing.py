"""Places the arguments of a call: moves them to the shardings that the programs want.

In:     the wanted shardings, which arguments are donated; the arrays of a call.
Out:    `Placing`: arrays in the right sharding are passed on as they are, the others moved by one batched `device_put`.
Method: a donated argument that is moved, or shares memory with another (`memory.py`), is copied first, so that the user's own
        array survives. Usually all arrays have the shardings of the last call, which is checked first.
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
    """Places the arguments of one step.

    Attributes:
        shardings: The wanted sharding of each argument.
        was_as_passed: Whether the last call's arrays were passed on as they were, except those that JAX itself would place.
    """

    def __init__(self, step: str, paths: Sequence[str], types: Sequence[jax.ShapeDtypeStruct], donated: Sequence[bool]):
        """`paths` may be shorter than `types`: constants, which come last, have none."""
        self._step, self._paths, self._donated = step, paths, donated
        self.shardings: list[Any] = [t.sharding for t in types]
        # For each, the sharding object last found equal to the wanted one: comparing identities is faster.
        self._seen = list(self.shardings)
        kinds = [(t.sharding.shard_shape(t.shape), t.dtype, t.sharding.mesh) for t in types]
        self._ownership = Ownership(kinds, donated)
        self.was_as_passed = False

    def set_results(self, results: Iterable[jax.Array]) -> None:
        """As in `Ownership`."""
        self._ownership.set_results(results)

    def place(self, given: Sequence[Any], arrays: Sequence[Any] | None = None) -> list[jax.Array]:
        """The placed arrays. `given`: the user's arrays. `arrays`: what they were reshaped to; None: `given` themselves.

        Raises `DonatedError`: one was donated before.
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
        """Whether each array has the sharding that was found right before, as in nearly all steps but the first."""
        try:
            return [array.sharding for array in arrays] == self._seen and not any(map(_IS_DELETED, arrays))
        except AttributeError:  # one is not a JAX array
            return False

    def _away(self, arrays: Sequence[Any]) -> list[int]:
        """Positions of arrays that are not in the wanted sharding."""
        seen, away = self._seen, []
        for k, array in enumerate(arrays):
            if isinstance(array, jax.Array):
                if array.is_deleted():  # JAX crashes on it if it is on several devices
                    gone = [path for path, a in zip(self._paths, arrays, strict=False) if is_gone(a)]
                    raise donated_error(self._step, list(dict.fromkeys(gone)))
                sharding = array.sharding
                if sharding is seen[k]:
                    continue
                wanted = self.shardings[k]
                # An equivalent sharding will do, but not for a donated array, which may be the user's own.
                if sharding == wanted or (not self._donated[k] and sharding.is_equivalent_to(wanted, array.ndim)):
                    seen[k] = sharding
                    continue
            away.append(k)
        return away

    def _move(self, placed: list[Any], away: Sequence[int]) -> None:
        if away:
            # `device_put` shares memory with the user's array where it can, even if told not to (a replica on the same
            # device; NumPy memory on CPU): donated arrays are copied first.
            moved = jax.device_put(
                [copied(placed[k]) if self._donated[k] else placed[k] for k in away], [self.shardings[k] for k in away]
            )
            for k, array in zip(away, moved, strict=True):
                placed[k] = array


def copied(array: Any) -> Any:
    """A copy in memory of its own."""
    return jnp.array(array, copy=True) if isinstance(array, jax.Array) else np.array(array)
