"""What a worker writes of a checkpoint, while it goes on with its steps; and what it reads of one.

In:     copies of its tiles in host memory; later a folder, and where in which array on disk each tile is.
Out:    a folder of its own in there, an OCDBT database of Zarr arrays as orbax's processes write theirs; digests of its files.
        Of a whole checkpoint, tiles.
Method: TensorStore moves so many bytes at a time; a copy is let go of when it is written. No two workers write one chunk.
        Whoever is told that a write has failed takes the folder away, so it is told when nothing is being written any more.
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
"""So much is being written at the same time: more only costs memory."""


@dataclass(frozen=True, slots=True)
class OnDisk:
    """An array on disk: the name under which orbax finds it, its shape, its dtype there, the shape of its chunks."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[int, ...]


class Disk:
    """Copies of tiles that wait to be written; they go when they are, or when no one wants them any more."""

    def __init__(self) -> None:
        self._tiles: dict[int, list[np.ndarray | None]] = {}
        self._since = time.monotonic()

    def take(self, save: int, tiles: Sequence[np.ndarray]) -> None:
        """Keep copies for a save."""
        self._tiles[save] = list(tiles)

    def forget(self, save: int) -> None:
        """Let go of the copies of a save; if it is being written, that ends soon."""
        self._tiles.pop(save, None)

    def standing_seconds(self) -> float:
        """How long nothing has come on, if it is writing."""
        return time.monotonic() - self._since

    def write(
        self, save: int, folder: str, arrays: Sequence[OnDisk], boxes: Sequence[tuple[int, int, Box]]
    ) -> dict[str, Digest]:
        """Write the tiles of a save to a folder of this worker's; of each box which array, which tile, and where in that.

        Returns:
            Digest of each file by its path in the folder.
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
        """Write all tiles; what is being written, and how many bytes it is, stands in `under_way`."""
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
    """Wait until calls of TensorStore have ended, however."""
    for call in calls:
        with contextlib.suppress(Exception):
            call.result()


def read_tiles(folder: str, arrays: Sequence[tuple[str, Sequence[Box]]]) -> Iterator[list[np.ndarray]]:
    """Parts of arrays of a checkpoint, array by array; of each its name on the disk, and which parts are wanted."""
    import tensorstore

    # A chunk that several parts need is read once, if they are read soon after each other.
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
    """Why this process cannot read, or write, beside a file of which another has told the SHA-256; empty: it can."""
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
    """Where an array lies in a checkpoint."""
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}, "path": name}


def _spec(array: OnDisk, folder: str) -> dict[str, Any]:
    """As TensorStore's documentation has it; small values lie in the tree's nodes, as orbax wants."""
    return {
        "driver": "zarr",
        "dtype": array.dtype,
        "metadata": {"shape": array.shape, "chunks": array.chunks, "compressor": {"id": "zstd", "level": 1}},
        "kvstore": _file(folder, array.name)
        | {"config": {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000}},
        # A chunk of zeros is written like any other: what is missing can then be seen.
        "store_data_equal_to_fill_value": True,
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
    }
