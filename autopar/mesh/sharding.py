"""How one tensor lies on a mesh: which axes split each dim, and over which it is an unreduced partial sum.

In:     tuples of axis names.
Out:    `Sharding`, hashable and small; local shapes, `PartitionSpec`s.
Method: the axes of a dim are major to minor and always in mesh order, so that a layout has one name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jax.sharding import PartitionSpec

if TYPE_CHECKING:
    from autopar.mesh.logical_mesh import LogicalMesh


@dataclass(frozen=True, slots=True, eq=False)
class Sharding:
    """How one tensor lies on a mesh.

    Attributes:
        dims: For each tensor dim the mesh axes that split it, major to minor, in mesh order.
        partial: Mesh axes over which the value is a sum not yet reduced, in mesh order.
    """

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Planning asks for it a million times.
        object.__setattr__(self, "_hash", hash((self.dims, self.partial)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Sharding):
            return NotImplemented
        return self._hash == other._hash and self.dims == other.dims and self.partial == other.partial

    def __reduce__(self) -> tuple[type[Sharding], tuple[object, ...]]:
        # Hashes of strings are another process's own.
        return Sharding, (self.dims, self.partial)

    @classmethod
    def replicated(cls, ndim: int) -> Sharding:
        """Whole on every device."""
        return cls(((),) * ndim)

    def num_shards(self, mesh: LogicalMesh) -> int:
        """Into how many parts the tensor is cut."""
        return math.prod(mesh.size_of(axis) for axes in self.dims for axis in axes)

    def local_shape(self, shape: Sequence[int], mesh: LogicalMesh) -> tuple[int, ...]:
        """Shape of one device's part."""
        return tuple(n // math.prod(mesh.size_of(a) for a in axes) for n, axes in zip(shape, self.dims, strict=True))

    def is_valid(self, shape: Sequence[int], mesh: LogicalMesh) -> bool:
        """Whether every dim that is split divides."""
        return all(n % math.prod(mesh.size_of(a) for a in axes) == 0 for n, axes in zip(shape, self.dims, strict=True))

    def partition_spec(self) -> PartitionSpec:
        """The same as JAX writes it; partial sums have no such form and count as replicated."""
        return PartitionSpec(*(None if not axes else axes[0] if len(axes) == 1 else axes for axes in self.dims))

    def __str__(self) -> str:
        body = "[" + ", ".join("".join(axes) if axes else "-" for axes in self.dims) + "]"
        return body + (f" partial {''.join(self.partial)}" if self.partial else "")
