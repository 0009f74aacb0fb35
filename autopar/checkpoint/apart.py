"""Has the workers of a Ray cluster write and read the arrays that they hold.

In:     to write: the leaves of a state, then the folder that orbax has made. To read: a checkpoint, and the arrays wanted.
Out:    written: `Taken` arrays in place of those that workers write, and their parts on disk, in orbax's format. Read: arrays
        on the workers.
Method: a small file in the workplace shows which workers see it. Each worker writes a folder named like those of orbax's own
        processes, which orbax merges; arrays of workers that do not see the file go through this process. No two workers
        write the same chunk, the unit in which an array is stored.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.checkpoint.leaves import knows_dtype
from autopar.checkpoint.manifest import NAME
from autopar.checkpoint.places import OnWorkers
from autopar.errors import warn
from autopar.mesh import Box
from autopar.runtime.digest import Digest
from autopar.runtime.ray.driver.handles import RemoteArray
from autopar.runtime.ray.driver.saves import Snapshot, Taken, read_arguments, take
from autopar.runtime.ray.worker.disk import OnDisk

CHUNK_BYTES = 64 * 2**20
"""The largest chunk: a device that wants a part of an array reads whole chunks."""


def take_apart(leaves: Iterable[Any], workplace: Path) -> dict[int, Taken]:
    """Have workers copy the arrays of a state that they hold, to write them into the workplace.

    Returns `id` of a leaf -> what to write in its place; without the leaves that this process writes.
    """
    mine = (x for x in leaves if isinstance(x, RemoteArray) and x.size and _written_dtype(x) is not None)
    arrays = list({id(leaf): leaf for leaf in mine}.values())
    if not arrays:
        return {}
    token = workplace / "token"
    token.write_text(secrets.token_hex(), encoding="utf-8")
    taken, refused = take(arrays, token)
    if refused:
        first, why = next(iter(refused.items()))
        others = f", and {len(refused) - 1} others" if len(refused) > 1 else ""
        warn(
            f"a checkpoint goes through the memory of this process, which is slow: {first}{others} cannot write to "
            f"{workplace.parent}: {why}. Pass a directory on a filesystem that all nodes have."
        )
    return {id(array): found for array, found in zip(arrays, taken, strict=True) if found is not None}


def discard(taken: Iterable[Taken]) -> None:
    """Free copies that will not be written."""
    for snapshot in _snapshots(taken):
        snapshot.discard()


def write_apart(arrays: Sequence[Taken], names: Sequence[str], folder: Path) -> dict[str, Digest]:
    """Have workers write arrays, perhaps the same one several times, under orbax's names; the digests of the files by path."""
    found: dict[str, Digest] = {}
    for group, snapshot in enumerate(_snapshots(arrays)):
        own = [
            (array.number, _on_disk(array, name))
            for array, name in zip(arrays, names, strict=True)
            if array.snapshot is snapshot
        ]
        found |= snapshot.write(folder, f"ocdbt.process_g{group}w", own)
    return found


def read_apart(wanted: Mapping[int, tuple[OnWorkers, tuple[str, ...]]], folder: Path) -> dict[int, RemoteArray]:
    """Have workers read the arrays that they will hold, if they see the folder; `wanted`: (place, path in the state)."""
    found: dict[int, RemoteArray] = {}
    for step in {id(place.step): place.step for place, _ in wanted.values()}.values():
        own = {k: (place.argument, path) for k, (place, path) in wanted.items() if place.step is step}
        names = {argument: ".".join(path) for argument, path in own.values()}
        read = read_arguments(step, names, folder, folder / NAME)
        found |= {k: read[argument] for k, (argument, _) in own.items() if argument in read}
    return found


def _snapshots(arrays: Iterable[Taken]) -> list[Snapshot]:
    return list({id(array.snapshot): array.snapshot for array in arrays}.values())


def _on_disk(array: Taken, name: str) -> OnDisk:
    dtype = _written_dtype(array)
    assert dtype is not None, "others are not taken"
    return OnDisk(name, array.shape, dtype, chunk_shape(array.shape, array.boxes, array.dtype.itemsize, CHUNK_BYTES))


def _written_dtype(array: RemoteArray | Taken) -> str | None:
    """The dtype on disk: bytes, if TensorStore lacks a dtype of one byte; None: workers cannot write the dtype."""
    if knows_dtype(array.dtype.name):
        return array.dtype.name
    return "uint8" if array.dtype.itemsize == 1 else None


def chunk_shape(shape: Sequence[int], boxes: Sequence[Box], itemsize: int, most_bytes: int) -> tuple[int, ...]:
    """The shape of an array's chunks, of at most `most_bytes`, such that each chunk is in one of the boxes.

    Chunks form a regular grid from the array's beginning; only the last along a dim may be shorter. So the length of a chunk
    along a dim divides every boundary between boxes. Chunks that are too large are then cut along the dim that leaves the
    largest pieces.
    """
    boundaries = [
        math.gcd(*(at for box in boxes for at in box[dim] if at < length)) for dim, length in enumerate(shape)
    ]
    chunk = [boundary or length for boundary, length in zip(boundaries, shape, strict=True)]
    while (num_bytes := math.prod(chunk) * itemsize) > most_bytes and math.prod(chunk) > 1:
        cuts = []
        for dim, length in enumerate(chunk):
            others = num_bytes // length
            cut = _cut(length, max(1, most_bytes // others), boundaries[dim] > 0)
            cuts.append((others * cut, dim, cut))
        small_enough = [cut for cut in cuts if cut[0] <= most_bytes]
        # If no dim suffices alone: cut the one that helps most as far as possible, and then another.
        _, dim, cut = max(small_enough, key=lambda c: (c[0], -c[1])) if small_enough else min(cuts)
        chunk[dim] = cut
    return tuple(chunk)


def _cut(length: int, most: int, has_boundary: bool) -> int:
    """A length of at most `most`, which divides `length` if there are boundaries."""
    if length <= most:
        return length
    if not has_boundary:
        return math.ceil(length / math.ceil(length / most))
    small = [n for n in range(1, math.isqrt(length) + 1) if length % n == 0]
    return max(n for n in (*small, *(length // n for n in small)) if n <= most)
