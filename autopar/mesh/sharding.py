"""Shardings: which mesh axes split each dim of a tensor, and over which axes it is an unreduced partial sum.

In:     tuples of axis names; a shape, an element type, a `LogicalMesh`.
Out:    `Sharding`, hashable and small; local shapes, `PartitionSpec`s; `ArrayType`, of an array that passes between programs;
        the box that each device holds; JAX's sharding over given devices.
Method: the axes of a dim are major to minor and always in mesh order, so that equal shardings have equal tuples. Objects are
        interned, since planning compares and looks them up a million times: equality is identity.
        JAX has no global array for a partial sum. Between programs it is one whose first dim concatenates the devices'
        partial values; on each device it has the shape of the sum, so that one program's result can take the memory of
        another's. Partial scalars become a vector. A value stacked over microbatches has a leading dim, never split.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

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


Box = tuple[tuple[int, int], ...]
"""For each dim (start, stop)."""


@dataclass(frozen=True, slots=True)
class ArrayType:
    """An array on a mesh.

    Attributes:
        shape: Global shape.
        dtype: Its element type.
        sharding: Sharding of its last dims; leading dims that it does not name are not split.
        mesh: The mesh.
        on_host: Whether it is in the memory of the devices' hosts.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding
    mesh: LogicalMesh
    on_host: bool = False

    @property
    def array(self) -> ArrayType:
        """The type of the JAX array: a partial sum with its concatenated dim, the sharding with every dim."""
        num_leading = len(self.shape) - len(self.sharding.dims)
        if not self.sharding.partial and not num_leading:
            return self
        shape, dims = list(self.shape), [*((),) * num_leading, *self.sharding.dims]
        if self.sharding.partial:
            if not self.sharding.dims:
                shape, dims = [*shape, 1], [*dims, ()]
            shape[num_leading] *= self.num_partial
            dims[num_leading] = (*self.sharding.partial, *dims[num_leading])
        return ArrayType(tuple(shape), self.dtype, Sharding(tuple(dims)), self.mesh, self.on_host)

    @property
    def num_partial(self) -> int:
        """How many partial values the whole is the sum of."""
        return math.prod(self.mesh.size_of(axis) for axis in self.sharding.partial)

    @property
    def is_vector(self) -> bool:
        """Whether it is a vector of partial scalars."""
        return bool(self.sharding.partial) and not self.sharding.dims

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def local_bytes(self) -> int:
        """Bytes of one device's shard."""
        leading = len(self.shape) - len(self.sharding.dims)
        each = self.sharding.local_bytes(self.shape[leading:], self.dtype, self.mesh)
        return math.prod(self.shape[:leading]) * each

    def on(self, places: jax.sharding.Mesh | AbstractMesh) -> NamedSharding:
        """JAX's sharding of the array over these devices."""
        spec, memory = self.array.sharding.partition_spec(), "pinned_host" if self.on_host else None
        made = NamedSharding(places, spec, memory_kind=memory)
        # Devices that are only compiled for deny having such a memory; with their abstract mesh JAX accepts it.
        is_accepted = memory is None or made.memory_kind == memory
        return made if is_accepted else NamedSharding(places.abstract_mesh, spec, memory_kind=memory)

    def struct(self, places: jax.sharding.Mesh | AbstractMesh) -> jax.ShapeDtypeStruct:
        """The array over these devices, as JAX's lowering takes it."""
        return jax.ShapeDtypeStruct(self.array.shape, self.dtype, sharding=self.on(places))

    def boxes(self) -> list[Box]:
        """The box of `array` that each device holds, in mesh order."""
        array = self.array
        return boxes(array.shape, array.sharding, array.mesh)

    def __str__(self) -> str:
        return f"{self.dtype}{'<host>' if self.on_host else ''}[{','.join(map(str, self.shape))}]"


def boxes(shape: Sequence[int], sharding: Sharding, mesh: LogicalMesh) -> list[Box]:
    """The box of a tensor that each device of a mesh holds, in mesh order."""
    found = []
    for place in itertools.product(*(range(n) for n in mesh.shape)):
        at = dict(zip(mesh.axis_sizes, place, strict=True))
        box = []
        for length, axes in zip(shape, sharding.dims, strict=True):
            index, parts = 0, 1
            for axis in axes:
                index = index * mesh.size_of(axis) + at[axis]
                parts *= mesh.size_of(axis)
            size = length // parts
            box.append((index * size, (index + 1) * size))
        found.append(tuple(box))
    return found
