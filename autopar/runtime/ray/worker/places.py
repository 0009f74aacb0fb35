"""A worker's devices and meshes; places arrays on them.

In:     its seat; array types; parts in host memory.
Out:    devices, shardings; arrays on the devices.
Method: XLA:CPU uses aligned host memory without a copy; an array that will be donated gets memory of its own.
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
"""XLA:CPU uses host memory that begins at a multiple of this without a copy."""


class Places:
    """The devices of a worker's mesh, all of which its JAX knows."""

    def __init__(self, seat: Seat):
        self.seat = seat
        self._meshes: dict[LogicalMesh, Mesh] = {}

    def mesh(self, mesh: LogicalMesh) -> Mesh:
        """The device mesh over the devices of all workers of the mesh."""
        if mesh not in self._meshes:
            devices = np.array(jax.devices()[: mesh.num_devices])
            self._meshes[mesh] = Mesh(devices.reshape(mesh.shape), mesh.axis_names)
        return self._meshes[mesh]

    def devices(self, kind: ArrayType) -> list[jax.Device]:
        """The worker's own devices, in mesh order."""
        everyone = self.mesh(kind.mesh).devices.flat
        return [everyone[device] for device in self.seat.devices]

    def sharding(self, kind: ArrayType) -> NamedSharding:
        """The sharding of arrays of this type, on the whole mesh."""
        return kind.on(self.mesh(kind.mesh))

    def putter(self, kind: ArrayType) -> Callable[[Sequence[np.ndarray]], jax.Array]:
        """The function that makes an array from the parts on the worker's devices; on several hosts, its share of the array."""
        struct, devices = jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=self.sharding(kind)), self.devices(kind)
        return lambda parts: put_shards(struct, parts, devices)


def on_devices(kind: ArrayType, places: Places, own_memory: bool) -> Callable[[Sequence[np.ndarray]], jax.Array]:
    """The function that makes an array from its distinct parts in host memory.

    `own_memory`: give each device memory of its own, shared with neither the host nor another device, for donation.
    """
    seat, held, boxes = places.seat, kind.boxes(), own_boxes(kind, places.seat)
    part_of, put = [boxes.index(held[device]) for device in seat.devices], places.putter(kind)
    return lambda parts: put([_own(parts[k]) if own_memory else parts[k] for k in part_of])


def aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Uninitialized memory that XLA:CPU uses without a copy."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    room = np.empty(size + ALIGNMENT_BYTES, np.uint8)
    start = -room.ctypes.data % ALIGNMENT_BYTES
    return room[start : start + size].view(dtype).reshape(tuple(shape))


def _own(part: np.ndarray) -> np.ndarray:
    """A copy, which XLA:CPU uses without copying again."""
    room = aligned(part.shape, part.dtype)
    room[...] = part
    return room
