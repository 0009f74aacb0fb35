"""Which worker has which devices.

In:     for each mesh its range of the cluster's devices; the devices of one host.
Out:    `Seat`s, one for each host and mesh, numbered through; a worker is the process in a seat.
Method: a mesh takes consecutive devices. Where they lie on several hosts, their workers form one group of processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.streams.instructions import MeshId

Layout = tuple[tuple[int, int], ...]
"""For each mesh its first device and how many there are."""


@dataclass(frozen=True, slots=True)
class Seat:
    """The devices of one mesh on one host.

    Attributes:
        number: Of the worker, among all.
        mesh: Which mesh.
        host: Which host.
        rank: Among the workers of the mesh.
        first: The first of its devices, as the mesh counts them.
        count: How many.
    """

    number: int
    mesh: MeshId
    host: int
    rank: int
    first: int
    count: int

    @property
    def devices(self) -> range:
        """Its devices, as the mesh counts them."""
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
    found: dict[MeshId, list[Seat]] = {}
    for seat in seats:
        found.setdefault(seat.mesh, []).append(seat)
    return found


def environment(seat: Seat, on_gpu: bool, flags: str, x64: bool) -> Mapping[str, str]:
    """What must be set before JAX starts in a worker, whose devices are GPUs or virtual CPU devices.

    `flags` are the driver's `XLA_FLAGS`, for programs are to be compiled as they would be there; `x64`: its JAX has 64
    bits.
    """
    kept = [flag for flag in flags.split() if "host_platform_device_count" not in flag]
    found = {"JAX_ENABLE_X64": str(int(x64)), "TF_CPP_MIN_LOG_LEVEL": "2"}
    if on_gpu:
        # Ray sets CUDA_VISIBLE_DEVICES. The driver may keep to its CPU. Messages need memory that XLA does not take.
        return found | {
            "XLA_FLAGS": " ".join(kept),
            "JAX_PLATFORMS": "cuda,cpu",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.85",
            # Code that is loaded at a kernel's first run waits for the GPU, which may wait for a message of this worker.
            "CUDA_MODULE_LOADING": "EAGER",
        }
    # Collectives of several programs starve in as few threads as a small machine has cores.
    kept.append(f"--xla_force_host_platform_device_count={seat.count}")
    return found | {"XLA_FLAGS": " ".join(kept), "JAX_PLATFORMS": "cpu", "PJRT_NPROC": "32"}
