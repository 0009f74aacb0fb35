"""Arrays of a checkpoint, read by the workers that will hold them.

In:     a step on a Ray cluster, which of its arguments are what on the disk.
Out:    `RemoteArray`s, where the step wants them.
Method: each worker reads the parts that its devices hold, copies once for all of its devices. Who does not see the
        checkpoint cannot read: what it would hold is left to the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.runtime.ray.driver.driver import RayStep
from autopar.runtime.ray.driver.handles import Copy, Part, RemoteArray


def read_arguments(step: RayStep, names: Mapping[int, str], folder: Path, token: Path) -> dict[int, RemoteArray]:
    """Have arguments of a step, of these names on the disk, read where they live; `token` is a file unlike that of any other.

    Returns:
        The arrays by position; without those of which a worker does not see the folder.

    Raises:
        WorkerError: A worker failed.
    """
    workers = step.workers
    if workers.closed:
        return {}
    homes = {argument: step.homes(argument) for argument in names}
    meshes = sorted({mesh for own, _ in homes.values() for mesh, _ in own})
    unseen = workers.unseen([seat.number for mesh in meshes for seat in workers.seats_on(mesh)], token, False)
    blind = {mesh for mesh in meshes if any(unseen[seat.number] for seat in workers.seats_on(mesh))}
    found: dict[int, RemoteArray] = {}
    wanted: dict[int, list[tuple[Any, ...]]] = {}
    for argument, (own, dim) in homes.items():
        if any(mesh in blind for mesh, _ in own):
            continue
        parts, first = [], 0
        for mesh, kind in own:
            key = workers.number()[0]
            for seat in workers.seats_on(mesh):
                wanted.setdefault(seat.number, []).append((key, kind, names[argument], (first, dim)))
            parts.append(Part((Copy(workers, mesh, kind, key),)))
            first += kind.shape[dim] if len(own) > 1 else 0
        found[argument] = RemoteArray(parts, dim)
    if wanted:
        workers.read({n: (str(folder), own) for n, own in wanted.items()})
    return found
