"""Writes a worker's part of a checkpoint beside its steps; reads parts of one.

In:     copies of tiles in host memory, a folder, and the place of each tile in an array on disk.
Out:    files in the folder: an OCDBT database of Zarr arrays, as the processes of orbax write theirs; their digests. For
        reading: tiles.
Method: TensorStore writes, a limited number of bytes at a time; a copy is freed when it is written. No two workers write the
        same chunk. When a write fails, the driver deletes the folder, so the error is raised only once nothing is being
        written any more.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autopar.mesh import Box
from autopar.runtime.digest import Digest, digest

CONCURRENT_BYTES = 2**30
"""The most bytes in flight: more only costs memory."""


@dataclass(frozen=True, slots=True)
class OnDisk:
    """An array on disk: its name for orbax, its shape, its dtype there, the shape of its chunks."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[int, ...]


class Disk:
    """Copies of tiles to be written; freed when they are, or when the save is cancelled."""

    def __init__(self) -> None:
        self._tiles: dict[int, list[np.ndarray | None]] = {}
        self._since = time.monotonic()

    def take(self, save: int, tiles: Sequence[np.ndarray]) -> None:
        """Keep copies for a save."""
        self._tiles[save] = list(tiles)

    def forget(self, save: int) -> None:
        """Free the copies of a save; if it is being written, that ends soon."""
        self._tiles.pop(save, None)

    def standing_seconds(self) -> float:
        """Seconds since its last progress, if it is writing."""
        return time.monotonic() - self._since

    def write(
        self, save: int, folder: str, arrays: Sequence[OnDisk], boxes: Sequence[tuple[int, int, Box]]
    ) -> dict[str, Digest]:
        """Write the tiles of a save to a folder of this worker's own; `boxes`: (array, tile, its box in the array).

        Returns the digest of each file, by its path in the folder.
        """
        import tensorstore

        self._stand(save)
        context = tensorstore.Context({"file_io_concurrency": {"limit": 16}})
        opened = [tensorstore.open(_spec(array, folder), create=True, open=True, context=context) for array in arrays]
        under_way = deque[tuple[Any, int]]()
        try:
            self._write_tiles(save, [one.result() for one in opened], boxes, under_way)
        finally:
            _settle([*opened, *(written for written, _ in under_way)])
        return self._digests(save, Path(folder))

    def _write_tiles(
        self, save: int, stores: Sequence[Any], boxes: Sequence[tuple[int, int, Box]], under_way: deque[tuple[Any, int]]
    ) -> None:
        """Write all tiles; `under_way`: the writes in flight, with their bytes."""
        last = {tile: k for k, (_, tile, _) in enumerate(boxes)}
        num_bytes = 0
        for k, (array, tile, box) in enumerate(boxes):
            data = self._tile(save, tile).view(stores[array].dtype.numpy_dtype)
            if last[tile] == k:
                self._tiles[save][tile] = None
            place = stores[array][tuple(slice(*side) for side in box)]
            under_way.append((place.write(data, can_reference_source_data_indefinitely=True), data.nbytes))
            num_bytes += data.nbytes
            while under_way and (num_bytes > CONCURRENT_BYTES or k == len(boxes) - 1):
                under_way[0][0].result()
                num_bytes -= under_way.popleft()[1]
                self._stand(save)

    def _digests(self, save: int, folder: Path) -> dict[str, Digest]:
        found = {}
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            found[str(path.relative_to(folder))] = digest(path, sync=True)
            self._stand(save)
        self.forget(save)
        return found

    def _tile(self, save: int, tile: int) -> np.ndarray:
        found = self._tiles[save][tile]
        assert found is not None, "a tile is let go of when its last part is written"
        return found

    def _stand(self, save: int) -> None:
        self._since = time.monotonic()
        if save not in self._tiles:
            raise InterruptedError("no one waits for this checkpoint any more")


def _settle(calls: Sequence[Any]) -> None:
    """Wait until calls of TensorStore have ended, successfully or not."""
    for call in calls:
        with contextlib.suppress(Exception):
            call.result()


def read_tiles(folder: str, arrays: Sequence[tuple[str, Sequence[Box]]]) -> Iterator[list[np.ndarray]]:
    """Read parts of a checkpoint's arrays, array by array; `arrays`: (name on disk, boxes wanted)."""
    import tensorstore

    # The cache: a chunk that several parts need is read once, if they are read soon after each other.
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 2**28}})
    stores = [
        tensorstore.open({"driver": "zarr", "kvstore": _file(folder, name)}, open=True, read=True, context=context)
        for name, _ in arrays
    ]
    ahead: deque[list[tuple[Any, int]]] = deque()
    num_bytes, begun = 0, 0
    for k in range(len(arrays)):
        while begun < len(arrays) and (begun <= k or num_bytes < CONCURRENT_BYTES):
            store = stores[begun].result()
            places = [store[tuple(slice(*side) for side in box)] for box in arrays[begun][1]]
            ahead.append([(place.read(), place.size * place.dtype.numpy_dtype.itemsize) for place in places])
            num_bytes += sum(size for _, size in ahead[-1])
            begun += 1
        own = ahead.popleft()
        yield [np.asarray(coming.result()) for coming, _ in own]
        num_bytes -= sum(size for _, size in own)


def unseen(token: str, word: str, writing: bool) -> str:
    """Why this process cannot read, or write, beside a file, given by path and SHA-256; "": it can."""
    if importlib.util.find_spec("tensorstore") is None:
        return "TensorStore is not installed there (pip install 'autopar[checkpoint]')"
    try:
        if digest(Path(token))[1] != word:
            return f"{token} is another file there"
    except OSError as error:
        return f"it does not see {token} ({error.strerror})"
    folder = Path(token).parent
    return f"it may not write to {folder}" if writing and not os.access(folder, os.W_OK) else ""


def _file(folder: str, name: str) -> dict[str, Any]:
    """The key-value store of an array in a checkpoint."""
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}, "path": name}


def _spec(array: OnDisk, folder: str) -> dict[str, Any]:
    """TensorStore's spec of an array; small values are stored inline in the tree's nodes, as orbax does."""
    return {
        "driver": "zarr",
        "dtype": array.dtype,
        "metadata": {"shape": array.shape, "chunks": array.chunks, "compressor": {"id": "zstd", "level": 1}},
        "kvstore": _file(folder, array.name)
        | {"config": {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000}},
        # Also write chunks of zeros, so that missing chunks can be detected.
        "store_data_equal_to_fill_value": True,
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
    }
