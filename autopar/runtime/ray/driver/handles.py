"""Arrays that live on workers, as the user holds them.

In:     where the parts of an array are and under which keys.
Out:    `RemoteArray`: shape, dtype and sharding to look at, `np.asarray` to fetch; passed to the next step as it is.
Method: an array is one part, or, stacked over several stages, one part behind the other along a dim. A part may lie on
        several meshes. What no one holds any more is let go of with the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from autopar.errors import DonatedError
from autopar.mesh import ArrayType, LogicalMesh
from autopar.partition.task import abstract_mesh
from autopar.runtime.ray.driver.workers import Workers
from autopar.runtime.stacks import Shaped, joined_shape, joint_spec
from autopar.streams.instructions import MeshId


class Copy:
    """An array of its owner's on one mesh, by its key there; let go of when this is gone, unless it is deleted."""

    __slots__ = ("owner", "mesh", "kind", "key", "is_deleted")

    def __init__(self, owner: Workers, mesh: MeshId, kind: ArrayType, key: int):
        self.owner, self.mesh, self.kind, self.key = owner, mesh, kind, key
        self.is_deleted = False

    def __del__(self) -> None:
        if not self.is_deleted:
            self.owner.release(self.mesh, self.key)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an array, in one or more copies."""

    copies: tuple[Copy, ...]


class RemoteArray(Shaped):
    """An array on the workers of a cluster, in one part or several along `dim`; shape, dtype and sharding are of the whole.

    `np.asarray(x)` and `x.fetch()` bring it here; there is no arithmetic on it before that. Passed to a step it stays
    where it is.
    """

    def __init__(self, parts: Sequence[Part], dim: int = 0, shape: tuple[int, ...] | None = None):
        """As of the attributes; `shape` where the one part that it has lies there in another, in microbatches."""
        self.parts, self.dim = tuple(parts), dim
        kinds = [part.copies[0].kind for part in parts]
        self.shape = joined_shape([kind.shape for kind in kinds], dim) if shape is None else shape
        self.dtype = kinds[0].dtype
        self.weak_type = False

    @property
    def sharding(self) -> NamedSharding:
        """How it lies on the devices, which are not this process's: its mesh has none."""
        return remote_sharding([part.copies[0].kind for part in self.parts], self.dim)

    def is_deleted(self) -> bool:
        """Whether a step has taken its memory over."""
        return any(copy.is_deleted for part in self.parts for copy in part.copies)

    def block_until_ready(self) -> RemoteArray:
        """Itself: a step returns when its results are there."""
        self.check()
        return self

    def check(self) -> None:
        """Raise if the array is no more.

        Raises:
            DonatedError: It was donated to a step.
        """
        if self.is_deleted():
            raise DonatedError(
                "this array has been deleted.",
                given=repr(self),
                wrong="it was donated: a step that it was passed to has taken its memory for its results.",
                do="use the array that the step returned in its place, fetch it before (np.asarray), or parallelize with "
                "donate_argnums=().",
                shape=self.shape,
                dtype=self.dtype,
            )

    def fetch(self) -> np.ndarray:
        """The whole array in this process."""
        self.check()
        found = [copy.owner.fetch(copy.mesh, copy.key, copy.kind) for copy in (part.copies[0] for part in self.parts)]
        return found[0].reshape(self.shape) if len(found) == 1 else np.concatenate(found, axis=self.dim)

    def item(self) -> Any:
        """The one element as a Python number."""
        return self.fetch().item()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(f"{self!r} cannot be had without a copy: it is on workers. Use np.asarray(x).")
        whole = self.fetch()
        whole = whole if dtype is None else whole.astype(dtype, copy=False)
        # What may not be written to is memory of Ray's, which others may look at too.
        return whole.copy() if copy and not whole.flags.writeable else whole

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without dims")
        return self.shape[0]

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __repr__(self) -> str:
        where = ", ".join(f"mesh {part.copies[0].mesh}" for part in self.parts)
        state = "deleted" if self.is_deleted() else f"on {where}"
        return f"RemoteArray(shape={self.shape}, dtype={self.dtype}, {state})"


def remote_sharding(kinds: Sequence[ArrayType], dim: int) -> NamedSharding:
    """The sharding of an array of one part, or several alike along a dim; of parts that are not alike, that of the first."""
    first = kinds[0]
    if len(kinds) == 1 or any(
        (k.shape, k.sharding, k.mesh) != (first.shape, first.sharding, first.mesh) for k in kinds
    ):
        return first.on(abstract_mesh(first.mesh))
    names = ("stage", *first.mesh.axis_names)
    mesh = abstract_mesh(LogicalMesh((len(kinds), *first.mesh.shape), names))
    return first.on(mesh).update(spec=joint_spec(first.sharding.partition_spec(), dim))


def host_array(array: Any) -> np.ndarray:
    """Any array in this process's memory; arrays of JAX on CPU without a copy."""
    if isinstance(array, jax.Array):
        return np.asarray(array)
    return array.fetch() if isinstance(array, RemoteArray) else np.asarray(array)
