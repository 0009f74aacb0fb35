"""The type of an array that passes between programs: shape, dtype, and sharding on a mesh.

In:     a shape, an element type, a `Sharding`, a `LogicalMesh`.
Out:    `ArrayType`, which can be compared and sent; the box that each device holds; JAX's sharding over given devices.
Method: JAX has no global array for a partial sum. Between programs it is one whose first dim concatenates the devices'
        partial values; on each device it has the shape of the sum, so that one program's result can take the memory of
        another's. Partial scalars become a vector. A value stacked over microbatches has a leading dim, never split.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from autopar.mesh.logical_mesh import LogicalMesh
from autopar.mesh.sharding import Sharding

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
