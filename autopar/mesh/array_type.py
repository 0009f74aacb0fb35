"""The type of an array between programs, and how it lies on a mesh.

In:     a shape, an element type, a `Sharding`, a `LogicalMesh`.
Out:    `ArrayType`, which can be compared and sent; what each device holds; the same over devices, as JAX has it.
Method: a partial sum has no global array of its own: between programs it is one whose first dim is so many times longer as
        devices hold a part, part behind part; on each it is shaped as the sum is, so that one program's result takes the
        memory of another's. A number's parts are a vector. What is stacked over microbatches has a leading dim of them, which
        is never split.
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
"""For each dim (first, behind the last) position."""


@dataclass(frozen=True, slots=True)
class ArrayType:
    """An array on a mesh.

    Attributes:
        shape: Of the whole.
        dtype: Its element type.
        sharding: How its last dims lie on the mesh; those before are whole.
        mesh: The mesh.
        on_host: Whether it lies in the memory of the devices' hosts.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding
    mesh: LogicalMesh
    on_host: bool = False

    @property
    def array(self) -> ArrayType:
        """As programs hold it: a partial sum with its longer dim, every dim told."""
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
        """Of how many parts the whole is the sum."""
        return math.prod(self.mesh.size_of(axis) for axis in self.sharding.partial)

    @property
    def is_vector(self) -> bool:
        """Whether programs hold a number's parts."""
        return bool(self.sharding.partial) and not self.sharding.dims

    @property
    def num_bytes(self) -> int:
        """Of the whole."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def local_bytes(self) -> int:
        """Of one device's share."""
        leading = len(self.shape) - len(self.sharding.dims)
        local = self.sharding.local_shape(self.shape[leading:], self.mesh)
        return math.prod((*self.shape[:leading], *local)) * self.dtype.itemsize

    def on(self, places: jax.sharding.Mesh | AbstractMesh) -> NamedSharding:
        """How the array of `array` lies over these devices, as JAX has it."""
        spec, memory = self.array.sharding.partition_spec(), "pinned_host" if self.on_host else None
        made = NamedSharding(places, spec, memory_kind=memory)
        # Devices that are only compiled for say that they have no such memory; of their mesh JAX believes it.
        is_believed = memory is None or made.memory_kind == memory
        return made if is_believed else NamedSharding(places.abstract_mesh, spec, memory_kind=memory)

    def struct(self, places: jax.sharding.Mesh | AbstractMesh) -> jax.ShapeDtypeStruct:
        """The array of `array` over these devices, as JAX wants it for lowering."""
        return jax.ShapeDtypeStruct(self.array.shape, self.dtype, sharding=self.on(places))

    def boxes(self) -> list[Box]:
        """What each device holds of the array of `array`, in mesh order."""
        array = self.array
        return boxes(array.shape, array.sharding, array.mesh)

    def __str__(self) -> str:
        return f"{self.dtype}{'<host>' if self.on_host else ''}[{','.join(map(str, self.shape))}]"


def boxes(shape: Sequence[int], sharding: Sharding, mesh: LogicalMesh) -> list[Box]:
    """The part of the tensor that each device of a mesh holds, in mesh order."""
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
