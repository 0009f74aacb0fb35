"""How one tensor lies on a mesh: which axes split each dim, and over which it is an unreduced partial sum.

In:     tuples of axis names.
Out:    `Sharding`, hashable and small; local shapes, `PartitionSpec`s.
Method: the axes of a dim are major to minor and always in mesh order, so that a layout has one name. There is one object of
        each, so that to compare two, and to look one up, which planning does a million times, is to compare addresses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jax.sharding import PartitionSpec

if TYPE_CHECKING:
    from autopar.mesh.logical_mesh import LogicalMesh


class _OneOfEach(type):
    """Gives out the same object for the same arguments, of a class whose objects never change."""

    def __init__(cls, *definition: Any):
        super().__init__(*definition)
        cls._known: dict[tuple[Any, ...], Any] = {}

    def __call__(cls, *args: Any, **named: Any) -> Any:
        key = (*args, *named.items())
        found = cls._known.get(key)
        if found is None:
            made = super().__call__(*args, **named)
            # However it was asked for: the first that was made stands for all that are equal.
            found = cls._known[key] = cls._known.setdefault(made.__reduce__()[1], made)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Sharding(metaclass=_OneOfEach):
    """How one tensor lies on a mesh.

    Attributes:
        dims: For each tensor dim the mesh axes that split it, major to minor, in mesh order.
        partial: Mesh axes over which the value is a sum not yet reduced, in mesh order.
    """

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[type[Sharding], tuple[Any, ...]]:
        # In another process it is the one that is known there.
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
        pairs = zip(shape, self.dims, strict=True)
        return tuple([n // math.prod(map(mesh.size_of, axes)) if axes else n for n, axes in pairs])

    def is_valid(self, shape: Sequence[int], mesh: LogicalMesh) -> bool:
        """Whether every dim that is split divides."""
        return all(n % math.prod(mesh.size_of(a) for a in axes) == 0 for n, axes in zip(shape, self.dims, strict=True))

    def partition_spec(self) -> PartitionSpec:
        """The same as JAX writes it; partial sums have no such form and count as replicated."""
        return PartitionSpec(*(None if not axes else axes[0] if len(axes) == 1 else axes for axes in self.dims))

    def __str__(self) -> str:
        body = "[" + ", ".join("".join(axes) if axes else "-" for axes in self.dims) + "]"
        return body + (f" partial {''.join(self.partial)}" if self.partial else "")
