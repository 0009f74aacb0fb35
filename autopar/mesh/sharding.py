"""Shardings: which mesh axes split each dim of a tensor, and over which axes it is an unreduced partial sum.

In:     tuples of axis names.
Out:    `Sharding`, hashable and small; local shapes, `PartitionSpec`s.
Method: the axes of a dim are major to minor and always in mesh order, so that equal shardings have equal tuples. Objects are
        interned, since planning compares and looks them up a million times: equality is identity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.sharding import PartitionSpec

if TYPE_CHECKING:
    from autopar.mesh.logical_mesh import LogicalMesh


class _Interned(type):
    """Interns the objects of an immutable class: equal arguments return the same object."""

    def __init__(cls, *definition: Any):
        super().__init__(*definition)
        cls._known: dict[tuple[Any, ...], Any] = {}

    def __call__(cls, *args: Any, **named: Any) -> Any:
        key = (*args, *named.items())
        found = cls._known.get(key)
        if found is None:
            made = super().__call__(*args, **named)
            # Other spellings of the arguments (by name, by default) return the same object.
            found = cls._known[key] = cls._known.setdefault(made.__reduce__()[1], made)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Sharding(metaclass=_Interned):
    """The sharding of one tensor on a mesh.

    Attributes:
        dims: For each tensor dim the mesh axes that split it, major to minor, in mesh order.
        partial: Mesh axes over which the value is a sum not yet reduced, in mesh order.
    """

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[type[Sharding], tuple[Any, ...]]:
        # Unpickling interns it in the other process.
        return Sharding, (self.dims, self.partial)

    @classmethod
    def replicated(cls, ndim: int) -> Sharding:
        """The sharding of a tensor that is whole on every device."""
        return cls(((),) * ndim)

    def num_shards(self, mesh: LogicalMesh) -> int:
        """Into how many shards the dims are split."""
        return math.prod(mesh.size_of(axis) for axes in self.dims for axis in axes)

    def local_shape(self, shape: Sequence[int], mesh: LogicalMesh) -> tuple[int, ...]:
        """Shape of one device's shard."""
        pairs = zip(shape, self.dims, strict=True)
        return tuple([n // math.prod(map(mesh.size_of, axes)) if axes else n for n, axes in pairs])

    def local_bytes(self, shape: Sequence[int], dtype: np.dtype | str, mesh: LogicalMesh) -> int:
        """Bytes of one device's shard."""
        return math.prod(self.local_shape(shape, mesh)) * np.dtype(dtype).itemsize

    def is_valid(self, shape: Sequence[int], mesh: LogicalMesh) -> bool:
        """Whether the axes of every dim divide it."""
        return all(n % math.prod(mesh.size_of(a) for a in axes) == 0 for n, axes in zip(shape, self.dims, strict=True))

    def partition_spec(self) -> PartitionSpec:
        """The sharding as JAX's `PartitionSpec`, which cannot express partial sums: they count as replicated."""
        return PartitionSpec(*(None if not axes else axes[0] if len(axes) == 1 else axes for axes in self.dims))

    def __str__(self) -> str:
        between = "+" if any(len(axis) > 1 for axes in (*self.dims, self.partial) for axis in axes) else ""
        body = "[" + ", ".join(between.join(axes) if axes else "-" for axes in self.dims) + "]"
        return body + (f" partial {between.join(self.partial)}" if self.partial else "")
