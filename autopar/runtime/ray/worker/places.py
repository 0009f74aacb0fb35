"""Where a worker's arrays are: its own devices, and the meshes that these are part of.

In:     its seat; types of buffers.
Out:    devices, shardings; arrays of parts in host memory.
Method: XLA:CPU takes aligned host memory as it is; a program that takes an array's memory over gets a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from autopar._jax import put_shards
from autopar.mesh import ArrayType, LogicalMesh
from autopar.runtime.ray.seats import Seat
from autopar.runtime.ray.transport.parcels import own_boxes

ALIGNMENT_BYTES = 64
"""XLA:CPU takes host memory that begins at a multiple of this as it is."""


class Places:
    """The devices of a worker, of which its JAX knows all of its mesh."""

    def __init__(self, seat: Seat):
        self.seat = seat
        self._meshes: dict[LogicalMesh, Mesh] = {}

    def mesh(self, mesh: LogicalMesh) -> Mesh:
        """The logical mesh over the devices of all its workers."""
        if mesh not in self._meshes:
            devices = np.array(jax.devices()[: mesh.num_devices])
            self._meshes[mesh] = Mesh(devices.reshape(mesh.shape), mesh.axis_names)
        return self._meshes[mesh]

    def devices(self, kind: ArrayType) -> list[jax.Device]:
        """The worker's own, in mesh order."""
        everyone = self.mesh(kind.mesh).devices.flat
        return [everyone[device] for device in self.seat.devices]

    def sharding(self, kind: ArrayType) -> NamedSharding:
        """Where arrays of this type are, on the whole mesh."""
        return kind.on(self.mesh(kind.mesh))

    def putter(self, kind: ArrayType) -> Callable[[Sequence[np.ndarray]], jax.Array]:
        """How an array is made of what each of the worker's devices holds; on several hosts, its share of the array."""
        struct, devices = jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=self.sharding(kind)), self.devices(kind)
        return lambda parts: put_shards(struct, parts, devices)


def on_devices(kind: ArrayType, places: Places, own_memory: bool) -> Callable[[Sequence[np.ndarray]], jax.Array]:
    """How a worker makes an array of its different parts in host memory.

    With `own_memory` devices share none with each other or the host: a program takes it over.
    """
    seat, held, boxes = places.seat, kind.boxes(), own_boxes(kind, places.seat)
    part_of, put = [boxes.index(held[device]) for device in seat.devices], places.putter(kind)
    return lambda parts: put([_own(parts[k]) if own_memory else parts[k] for k in part_of])


def aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Empty memory that XLA:CPU takes without a copy."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    room = np.empty(size + ALIGNMENT_BYTES, np.uint8)
    start = -room.ctypes.data % ALIGNMENT_BYTES
    return room[start : start + size].view(dtype).reshape(tuple(shape))


def _own(part: np.ndarray) -> np.ndarray:
    """A copy, which XLA:CPU does not copy again."""
    room = aligned(part.shape, part.dtype)
    room[...] = part
    return room
