"""The driver's side of checkpoints that workers write and read.

In:     to write: `RemoteArray`s, and a file in the folder of the checkpoint. To read: a step, the names of its arguments on
        disk, and the folder.
Out:    written: `Taken` arrays, fixed at the time of taking, and `Snapshot`s, which write them. Read: `RemoteArray`s in the
        shardings of the step.
Method: each distinct part of an array is copied and written by one of the workers that hold it, the one with the fewest bytes
        to write so far. A worker that does not see the file cannot write or read beside it: if only such workers hold a
        part, the whole array is left to the caller. Each worker reads the distinct parts that its devices hold, once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.grouping import grouped
from autopar.mesh import ArrayType, Box
from autopar.runtime.digest import Digest
from autopar.runtime.ray.driver.driver import RayStep
from autopar.runtime.ray.driver.handles import Copy, Part, RemoteArray
from autopar.runtime.ray.driver.workers import Workers
from autopar.runtime.ray.share import Key
from autopar.runtime.ray.transport.parcels import moved
from autopar.runtime.ray.worker.disk import OnDisk
from autopar.runtime.stacks import Shaped

_Place = tuple[Key, ArrayType, int]
"""An array on a mesh, and the device of the mesh that holds a part of it."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of an array: the worker that writes it, its place there, and its box in the whole array."""

    worker: int
    place: _Place
    box: Box


class Snapshot:
    """Copies of arrays in the memory of the workers' hosts, until they are written or discarded."""

    def __init__(self, owner: Workers, arrays: Sequence[Sequence[Tile]]):
        """Make the copies; on return, the arrays may be overwritten."""
        self._owner, self._number = owner, owner.number()[0]
        self._arrays = arrays
        # Parts that several arrays share are copied once: for each worker, (key, device) -> number of the copy.
        self._tiles: dict[int, dict[tuple[Key, int], int]] = {}
        places: dict[int, list[_Place]] = {}
        for tile in (tile for own in arrays for tile in own):
            key, _, device = tile.place
            seen = self._tiles.setdefault(tile.worker, {})
            if (key, device) not in seen:
                seen[key, device] = len(seen)
                places.setdefault(tile.worker, []).append(tile.place)
        try:
            owner.call("take", {worker: (self._number, own) for worker, own in places.items()}, harmless=True)
        except BaseException:
            self.discard()  # some workers may have made theirs
            raise

    def write(self, folder: Path, prefix: str, arrays: Sequence[tuple[int, OnDisk]]) -> dict[str, Digest]:
        """Have the workers write arrays into folders whose names begin with `prefix`, and wait; this frees the copies.

        Returns:
            The digest of each file, by its path in the folder.

        Raises:
            WorkerError: A worker has ended, or makes no progress.
            OSError: A worker could not write.
        """
        boxes: dict[int, list[tuple[int, int, Box]]] = {}
        for k, (number, _) in enumerate(arrays):
            for tile in self._arrays[number]:
                key, _, device = tile.place
                boxes.setdefault(tile.worker, []).append((k, self._tiles[tile.worker][key, device], tile.box))
        kinds = [kind for _, kind in arrays]
        # Made by this process: on a network filesystem it might see folders of others only after a while.
        for n in boxes:
            (folder / f"{prefix}{n}").mkdir()
        calls = {n: (str(folder / f"{prefix}{n}"), kinds, own) for n, own in boxes.items()}
        found = self._owner.write(self._number, calls)
        return {f"{prefix}{n}/{name}": value for n, own in found.items() for name, value in own.items()}

    def discard(self) -> None:
        """Free the copies without writing them."""
        self._owner.forget(self._number)


class Taken(Shaped):
    """An array as it was when taken: array `number` of a snapshot, with its parts (`boxes`)."""

    def __init__(self, snapshot: Snapshot, number: int, array: RemoteArray, boxes: Sequence[Box]):
        self.snapshot, self.number, self.boxes = snapshot, number, tuple(boxes)
        self.shape, self.dtype = array.shape, array.dtype


def take(arrays: Sequence[RemoteArray], token: Path) -> tuple[list[Taken | None], dict[str, str]]:
    """Copy arrays on their workers; `token`: a file, with unique content, in the folder that they will be written to.

    Returns:
        The copy of each array, None if its workers cannot write it; and the workers that cannot, with the reasons.

    Raises:
        DonatedError: One was donated.
        WorkerError: Its workers failed.
    """
    for array in arrays:
        array.check()
    found: list[Taken | None] = [None] * len(arrays)
    refused: dict[str, str] = {}
    for members in grouped((id(_owner(array)), k) for k, array in enumerate(arrays)).values():
        owner = _owner(arrays[members[0]])
        meshes = {copy.mesh for k in members for part in arrays[k].parts for copy in part.copies}
        seats = [seat for mesh in sorted(meshes) for seat in owner.seats_on(mesh)]
        unseen = owner.unseen([seat.number for seat in seats], token, True)
        refused.update({str(seat): unseen[seat.number] for seat in seats if unseen[seat.number]})
        load = {seat.number: 0 for seat in seats if not unseen[seat.number]}
        tiles = {k: own for k in members if (own := tiles_of(arrays[k], load)) is not None}
        if tiles:
            snapshot = Snapshot(owner, list(tiles.values()))
            for number, (k, own) in enumerate(tiles.items()):
                found[k] = Taken(snapshot, number, arrays[k], [tile.box for tile in own])
    return found, refused


def tiles_of(array: RemoteArray, load: dict[int, int]) -> list[Tile] | None:
    """The distinct parts of an array, each with one writer.

    `load`: the bytes that each worker that can write has to write so far; increased.

    Returns the parts; None: no worker can write one of them.
    """
    found: list[Tile] = []
    own = dict(load)
    first = 0
    for part in array.parts:
        copies = [holders for copy in part.copies if (holders := _holders(copy, load)) is not None]
        if not copies:
            return None
        holders = min(copies, key=lambda c: min(own[tile.worker] for held in c.values() for tile in held))
        for held in holders.values():
            tile = min(held, key=lambda t: (own[t.worker], t.worker))
            own[tile.worker] += math.prod(stop - start for start, stop in tile.box) * array.dtype.itemsize
            found.append(Tile(tile.worker, tile.place, moved(tile.box, first, array.dim)))
        first += part.copies[0].kind.shape[array.dim] if len(array.parts) > 1 else 0
    load.update(own)
    return found


def _holders(copy: Copy, load: Mapping[int, int]) -> dict[Box, list[Tile]] | None:
    """The workers that could write each part of a copy; None: a part has none."""
    boxes = copy.kind.boxes()
    found: dict[Box, list[Tile]] = {box: [] for box in boxes}
    for seat in copy.owner.seats_on(copy.mesh):
        for device in seat.devices if seat.number in load else ():
            found[boxes[device]].append(Tile(seat.number, (copy.key, copy.kind, device), boxes[device]))
    return found if all(found.values()) else None


def _owner(array: RemoteArray) -> Workers:
    return array.parts[0].copies[0].owner


def read_arguments(step: RayStep, names: Mapping[int, str], folder: Path, token: Path) -> dict[int, RemoteArray]:
    """Have the workers read arguments of a step; `names`: on disk, by argument; `token`: a file with unique content there.

    Returns:
        The arrays by argument, except those of meshes with a worker that does not see the folder.

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
        workers.call("read", {n: (str(folder), own) for n, own in wanted.items()}, harmless=True)
    return found
