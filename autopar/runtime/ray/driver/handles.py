"""The user's handles of arrays on workers.

In:     the meshes and keys of the parts of an array.
Out:    `RemoteArray`: has shape, dtype and sharding; `np.asarray` fetches it; it can be passed to the next step.
Method: an array has one part, or, stacked over several stages, several parts along a dim. A part may have copies on several
        meshes. Arrays without a handle are freed with the next step.
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
    """A copy of a part on one mesh, by its key there; freed when this object is garbage-collected, unless it was donated."""

    __slots__ = ("owner", "mesh", "kind", "key", "is_deleted")

    def __init__(self, owner: Workers, mesh: MeshId, kind: ArrayType, key: int):
        self.owner, self.mesh, self.kind, self.key = owner, mesh, kind, key
        self.is_deleted = False

    def __del__(self) -> None:
        if not self.is_deleted:
            self.owner.release(self.mesh, self.key)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an array, with one or more copies."""

    copies: tuple[Copy, ...]


class RemoteArray(Shaped):
    """An array on the workers of a cluster, in one or several parts along `dim`; shape, dtype and sharding are of the whole.

    `np.asarray(x)` and `x.fetch()` copy it to this process; nothing can be computed with it before that. Passing it to a
    step moves no data.
    """

    def __init__(self, parts: Sequence[Part], dim: int = 0, shape: tuple[int, ...] | None = None):
        """`shape`: of the whole, if its single part has another shape on the workers, with a dim of microbatches."""
        self.parts, self.dim = tuple(parts), dim
        kinds = [part.copies[0].kind for part in parts]
        self.shape = joined_shape([kind.shape for kind in kinds], dim) if shape is None else shape
        self.dtype = kinds[0].dtype

    @property
    def sharding(self) -> NamedSharding:
        """Its sharding, over an abstract mesh: the devices belong to other processes."""
        return remote_sharding([part.copies[0].kind for part in self.parts], self.dim)

    def is_deleted(self) -> bool:
        """Whether it was donated to a step."""
        return any(copy.is_deleted for part in self.parts for copy in part.copies)

    def block_until_ready(self) -> RemoteArray:
        """The array itself: a step returns when its results are computed."""
        self.check()
        return self

    def check(self) -> None:
        """Check that the array was not donated. Raises `DonatedError`: it was."""
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
        """The whole array, copied to this process."""
        self.check()
        found = [copy.owner.fetch(copy.mesh, copy.key, copy.kind) for copy in (part.copies[0] for part in self.parts)]
        return found[0].reshape(self.shape) if len(found) == 1 else np.concatenate(found, axis=self.dim)

    def item(self) -> Any:
        """The only element, as a Python number."""
        return self.fetch().item()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(f"{self!r} cannot be had without a copy: it is on workers. Use np.asarray(x).")
        whole = self.fetch()
        whole = whole if dtype is None else whole.astype(dtype, copy=False)
        # Memory that is not writeable is shared memory of Ray.
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
    """The sharding of an array of one part, or of several equal parts along a dim; if they differ, that of the first."""
    first = kinds[0]
    if len(kinds) == 1 or any(
        (k.shape, k.sharding, k.mesh) != (first.shape, first.sharding, first.mesh) for k in kinds
    ):
        return first.on(abstract_mesh(first.mesh))
    names = ("stage", *first.mesh.axis_names)
    mesh = abstract_mesh(LogicalMesh((len(kinds), *first.mesh.shape), names))
    return first.on(mesh).update(spec=joint_spec(first.sharding.partition_spec(), dim))


def host_array(array: Any) -> np.ndarray:
    """Any array as a NumPy array in this process; without a copy for JAX arrays on CPU."""
    if isinstance(array, jax.Array):
        return np.asarray(array)
    return array.fetch() if isinstance(array, RemoteArray) else np.asarray(array)
