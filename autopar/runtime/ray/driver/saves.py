"""Arrays on workers, as a checkpoint takes them: copied where they are, and written from there; and read by those that
will hold them.

In:     `RemoteArray`s; a file in the folder that the checkpoint goes to, or lies in; a step, which of its arguments are what
        there.
Out:    `Taken` arrays, which stay as they were when taken; `Snapshot`s, which write them. `RemoteArray`s, where the step
        wants them.
Method: every different part of an array is copied and written by one of the workers that hold it, the one that has least
        to write so far. Who does not see the file cannot write beside it, or read: a part that no other worker has is left
        to the caller, with its whole array. Each worker reads the parts that its devices hold, copies once for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
"""An array of a worker, and one of its mesh's devices that holds a part."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of an array: who writes it, what it is there, and where in the whole array."""

    worker: int
    place: _Place
    box: Box


class Snapshot:
    """Copies of arrays in the memory of their workers' hosts: the owner's, until they are written or discarded."""

    def __init__(self, owner: Workers, arrays: Sequence[Sequence[Tile]]):
        """Have the copies made; when this returns, the arrays may be overwritten."""
        self._owner, self._number = owner, owner.number()[0]
        self._arrays = arrays
        # What several arrays share is copied once: for each worker its places, in the order in which they are copied.
        self._tiles: dict[int, dict[tuple[Key, int], int]] = {}
        places: dict[int, list[_Place]] = {}
        for tile in (tile for own in arrays for tile in own):
            key, _, device = tile.place
            seen = self._tiles.setdefault(tile.worker, {})
            if (key, device) not in seen:
                seen[key, device] = len(seen)
                places.setdefault(tile.worker, []).append(tile.place)
        try:
            owner.take(self._number, {worker: (own,) for worker, own in places.items()})
        except BaseException:
            self.discard()  # some may have copied theirs
            raise

    def write(self, folder: Path, prefix: str, arrays: Sequence[tuple[int, OnDisk]]) -> dict[str, Digest]:
        """Have arrays written into folders whose names begin so, and wait for it; the copies are gone then.

        Returns:
            Digest of each file by its path in the folder.

        Raises:
            WorkerError: A worker has ended, or does not come on.
            OSError: A worker could not write.
        """
        boxes: dict[int, list[tuple[int, int, Box]]] = {}
        for k, (number, _) in enumerate(arrays):
            for tile in self._arrays[number]:
                key, _, device = tile.place
                boxes.setdefault(tile.worker, []).append((k, self._tiles[tile.worker][key, device], tile.box))
        kinds = [kind for _, kind in arrays]
        for n in boxes:  # made here: what others make, a network filesystem may show to this process only after a while
            (folder / f"{prefix}{n}").mkdir()
        calls = {n: (str(folder / f"{prefix}{n}"), kinds, own) for n, own in boxes.items()}
        found = self._owner.write(self._number, calls)
        return {f"{prefix}{n}/{name}": value for n, own in found.items() for name, value in own.items()}

    def discard(self) -> None:
        """Have the copies dropped: they will not be written."""
        self._owner.forget(self._number)


class Taken(Shaped):
    """An array as it was when it was taken: the parts (`boxes`) of array `number` of a snapshot."""

    def __init__(self, snapshot: Snapshot, number: int, array: RemoteArray, boxes: Sequence[Box]):
        self.snapshot, self.number, self.boxes = snapshot, number, tuple(boxes)
        self.shape, self.dtype = array.shape, array.dtype


def take(arrays: Sequence[RemoteArray], token: Path) -> tuple[list[Taken | None], dict[str, str]]:
    """Copy arrays where they are; `token` is a file beside which they will be written, unlike any other.

    Returns:
        Each as it is now, None where its workers cannot write it; and which workers cannot, and why.

    Raises:
        DonatedError: One is no more.
        WorkerError: Its workers failed.
    """
    for array in arrays:
        array.check()
    groups: dict[int, list[int]] = {}
    for k, array in enumerate(arrays):
        groups.setdefault(id(_owner(array)), []).append(k)
    found: list[Taken | None] = [None] * len(arrays)
    refused: dict[str, str] = {}
    for members in groups.values():
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
    """The different parts of an array, each with one writer.

    `load` is how many bytes each worker writes so far, of those that can write; it is added to.

    Returns:
        The parts; None: of one, there is no writer.
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
    """By part of a copy who could write it; None: someone is missing."""
    boxes = copy.kind.boxes()
    found: dict[Box, list[Tile]] = {box: [] for box in boxes}
    for seat in copy.owner.seats_on(copy.mesh):
        for device in seat.devices if seat.number in load else ():
            found[boxes[device]].append(Tile(seat.number, (copy.key, copy.kind, device), boxes[device]))
    return found if all(found.values()) else None


def _owner(array: RemoteArray) -> Workers:
    return array.parts[0].copies[0].owner


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
