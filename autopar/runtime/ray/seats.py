"""Assigns devices to workers.

In:     the range of the cluster's devices of each mesh; the number of devices per host.
Out:    `Seat`s, one for each host and mesh, numbered; a worker is the process of a seat.
Method: a mesh has consecutive devices. If they are on several hosts, its workers form one `jax.distributed` group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.grouping import grouped
from autopar.streams.instructions import MeshId

Layout = tuple[tuple[int, int], ...]
"""The first device and the number of devices of each mesh."""


@dataclass(frozen=True, slots=True)
class Seat:
    """The devices of one mesh on one host.

    Attributes:
        number: The worker's number, among all workers.
        mesh: The mesh.
        host: The host.
        rank: The worker's number among the workers of the mesh.
        first: The first of its devices, by its number in the mesh.
        count: Number of its devices.
    """

    number: int
    mesh: MeshId
    host: int
    rank: int
    first: int
    count: int

    @property
    def devices(self) -> range:
        """Its devices, by their numbers in the mesh."""
        return range(self.first, self.first + self.count)

    def __str__(self) -> str:
        return f"worker {self.number} (mesh {self.mesh}, host {self.host})"


def seats_of(layout: Layout, devices_per_host: int) -> tuple[Seat, ...]:
    """The seats of all meshes, mesh by mesh."""
    found: list[Seat] = []
    for mesh, (first, count) in enumerate(layout):
        at, rank = first, 0
        while at < first + count:
            host = at // devices_per_host
            end = min(first + count, (host + 1) * devices_per_host)
            found.append(Seat(len(found), mesh, host, rank, at - first, end - at))
            at, rank = end, rank + 1
    return tuple(found)


def by_mesh(seats: Sequence[Seat]) -> dict[MeshId, list[Seat]]:
    """The seats of each mesh."""
    return grouped((seat.mesh, seat) for seat in seats)


def environment(seat: Seat, on_gpu: bool, flags: str, x64: bool) -> Mapping[str, str]:
    """The environment variables of a worker, whose devices are GPUs or virtual CPU devices.

    `flags`: the driver's `XLA_FLAGS`, with which workers compile too. `x64`: whether the driver's JAX has 64-bit types.
    """
    kept = [flag for flag in flags.split() if "host_platform_device_count" not in flag]
    found = {"JAX_ENABLE_X64": str(int(x64)), "TF_CPP_MIN_LOG_LEVEL": "2"}
    if on_gpu:
        # Ray sets CUDA_VISIBLE_DEVICES. The driver may have JAX_PLATFORMS=cpu. Messages need memory that XLA leaves free.
        return found | {
            "XLA_FLAGS": " ".join(kept),
            "JAX_PLATFORMS": "cuda,cpu",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.85",
            # Loading code at a kernel's first run waits for the GPU, which may be waiting for a message of this worker.
            "CUDA_MODULE_LOADING": "EAGER",
        }
    # With only as many threads as a small machine has cores, collectives of several programs starve.
    kept.append(f"--xla_force_host_platform_device_count={seat.count}")
    return found | {"XLA_FLAGS": " ".join(kept), "JAX_PLATFORMS": "cpu", "PJRT_NPROC": "32"}
