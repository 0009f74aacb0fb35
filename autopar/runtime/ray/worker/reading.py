"""Reads a worker's portions of the batches, beside its steps.

In:     a pickled reader, which opens portions; the portions that this worker needs, and the arrays that it wants of them.
Out:    arrays on the worker's devices, by key; the kind of each portion.
Method: on a thread of its own, one batch after the other. A batch of another kind than usual is kept until the driver says
        what to do with it.
"""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from autopar.errors import BatchError
from autopar.runtime.ray.rows import Wanted, cut_out
from autopar.runtime.ray.share import Key
from autopar.runtime.ray.transport.parcels import own_boxes
from autopar.runtime.ray.worker.places import Places, on_devices

LeafKind = tuple[tuple[int, ...], str]
"""Shape and dtype of an array."""


@dataclass(frozen=True, slots=True)
class PortionKind:
    """The kind of a portion: its pytree structure as text, and the kinds of its arrays by path."""

    tree: str
    leaves: Mapping[str, LeafKind]


class OpenPortion(Protocol):
    """An open portion of the batches."""

    def at(self, number: int) -> Any | None:
        """The portion of batch `number`; None: the batches have ended."""

    def position(self, number: int) -> Any | None:
        """The position of the source before batch `number`, as JSON; None: the source has none."""


class Reader(Protocol):
    """Opens portions; it is sent to the workers."""

    def open(self, host: int, hosts: int, number: int, position: Any | None) -> OpenPortion:
        """Portion `host` of `hosts`, from batch `number` on; `position`: of the source there, if it has one."""


@dataclass(slots=True)
class _Source:
    """A source of batches: the worker's open portions, their usual kind, the arrays wanted, and batches not placed yet."""

    hosts: int
    open: dict[int, OpenPortion]
    kind: PortionKind
    wanted: tuple[Wanted, ...]
    drawn: dict[int, dict[int, list[Any]]]


class Readings:
    """The sources that a worker reads; owns open portions, and arrays that no step has taken yet.

    `arrays`: these arrays, by key.
    """

    def __init__(self, places: Places):
        self._places, self._sources = places, dict[int, _Source]()
        self.arrays: dict[Key, jax.Array] = {}
        self._since = time.monotonic()

    def standing_seconds(self) -> float:
        """Seconds since its last progress, if it is reading."""
        return time.monotonic() - self._since

    def open(
        self,
        source: int,
        reader: bytes,
        hosts: int,
        number: int,
        positions: Mapping[int, Any],
        kind: PortionKind,
        wanted: tuple[Wanted, ...],
    ) -> None:
        """Open a source.

        Args:
            source: Its number.
            reader: Opens portions; pickled.
            hosts: Number of portions.
            number: The first batch to read.
            positions: This worker's portions -> the position of the source there; None: it is not known.
            kind: The usual kind of a portion.
            wanted: The arrays to make of a batch.
        """
        made: Reader = pickle.loads(reader)
        own = _Source(hosts, {}, kind, wanted, {})
        for host, position in positions.items():
            self._since = time.monotonic()
            own.open[host] = self._tried(own, host, number, lambda h=host, p=position: made.open(h, hosts, number, p))  # type: ignore[misc]
        self._sources[source] = own

    def draw(self, source: int, number: int, keys: Sequence[Key]) -> dict[int, PortionKind | None]:
        """Read a batch, and place it under these keys if it is of the usual kind.

        Returns the kind of each portion; None: the portion has ended.
        """
        own, found = self._sources[source], dict[int, PortionKind | None]()
        drawn: dict[int, list[Any]] = {}
        for host, portion in own.open.items():
            self._since = time.monotonic()
            batch = self._tried(own, host, number, lambda p=portion: p.at(number))  # type: ignore[misc]
            found[host] = None if batch is None else kind_of(batch)
            drawn[host] = jax.tree.leaves(batch)
        own.drawn[number] = drawn
        if all(kind == own.kind for kind in found.values()):
            self.place(source, number, own.wanted, keys)
        return found

    def place(self, source: int, number: int, wanted: Sequence[Wanted], keys: Sequence[Key]) -> None:
        """Place a batch that was read on the devices."""
        drawn = self._sources[source].drawn.pop(number)
        for each, key in zip(wanted, keys, strict=True):
            portions = {host: np.asarray(leaves[each.leaf]) for host, leaves in drawn.items()}
            boxes = own_boxes(each.kind, self._places.seat)
            self.arrays[key] = on_devices(each.kind, self._places, True)(
                [cut_out(each, box, portions) for box in boxes]
            )

    def bring(self, source: int, number: int, hosts: Sequence[int]) -> dict[int, list[np.ndarray]]:
        """The arrays of portions of a batch that was read, in host memory."""
        drawn = self._sources[source].drawn.pop(number)
        return {host: [np.asarray(leaf) for leaf in drawn[host]] for host in hosts}

    def positions(self, source: int, number: int, hosts: Sequence[int]) -> dict[int, Any]:
        """The positions of these portions before batch `number`."""
        return {host: self._sources[source].open[host].position(number) for host in hosts}

    def close(self, source: int, keys: Sequence[Key]) -> None:
        """Stop reading a source, and free the arrays under these keys, which no step will take."""
        self._sources.pop(source, None)
        for key in keys:
            self.arrays.pop(key, None)

    def _tried(self, own: _Source, host: int, number: int, call: Any) -> Any:
        """The result of a call of the user's function; an exception becomes a `BatchError` with its place."""
        try:
            return call()
        except Exception as error:
            line = traceback.extract_tb(error.__traceback__)[-1]
            raise BatchError(
                "a worker could not read its portion of a batch.",
                given=f"batches(host={host}, hosts={own.hosts}), the batch of step {number}, on {self._places.seat}",
                wrong=f"{type(error).__name__}: {error}, at {line.filename}:{line.lineno}.",
                do="mend what raised it; it ran in the worker's process, on its host.",
            ) from error


def kind_of(batch: Any) -> PortionKind:
    """The kind of a batch, or of a portion; 64-bit dtypes of NumPy count as the dtypes that JAX converts them to."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(batch)
    return PortionKind(str(tree), {jax.tree_util.keystr(path): _leaf_kind(leaf) for path, leaf in leaves})


def _leaf_kind(leaf: Any) -> LeafKind:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    return tuple(np.shape(leaf)), str(jax.dtypes.canonicalize_dtype(dtype))
