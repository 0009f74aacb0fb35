"""What a worker reads of each batch, while it goes on with its steps.

In:     a reader, packed: how to open a portion of the batches; which portions this worker needs, and where their rows go.
Out:    arrays of the host's devices, under keys; what each portion was like.
Method: on a thread of its own, one batch after the other. Whatever is unlike the other batches is kept until it is said
        what becomes of it.
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
    """What a portion of a batch is like: its containers, in words, and its arrays, by path."""

    tree: str
    leaves: Mapping[str, LeafKind]


class OpenPortion(Protocol):
    """A portion of the batches, being read."""

    def at(self, number: int) -> Any | None:
        """The portion of batch `number`; None: there are not so many."""

    def position(self, number: int) -> Any | None:
        """Where the source is when batch `number` is the next, as JSON; None: it cannot tell."""


class Reader(Protocol):
    """What opens portions; it is sent to the workers."""

    def open(self, host: int, hosts: int, number: int, position: Any | None) -> OpenPortion:
        """Portion `host` of `hosts`, from batch `number` on, where the source is at a position."""


@dataclass(slots=True)
class _Source:
    """Batches that are being read: the worker's own portions, their usual kind and place, and what is not placed yet."""

    hosts: int
    open: dict[int, OpenPortion]
    kind: PortionKind
    wanted: tuple[Wanted, ...]
    drawn: dict[int, dict[int, list[Any]]]


class Readings:
    """What a worker reads; owns what it has opened, and arrays that no step has taken yet.

    Attributes:
        arrays: These, by key.
    """

    def __init__(self, places: Places):
        self._places, self._sources = places, dict[int, _Source]()
        self.arrays: dict[Key, jax.Array] = {}
        self._since = time.monotonic()

    def standing_seconds(self) -> float:
        """How long nothing has come on, if it is reading."""
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
        """Open a source: its number, what opens portions (pickled), how many portions and from which batch on.

        Each portion of this worker's begins at its position, None: that is not known; usually it is of this kind, and this
        becomes of it.
        """
        made: Reader = pickle.loads(reader)
        own = _Source(hosts, {}, kind, wanted, {})
        for host, position in positions.items():
            self._since = time.monotonic()
            own.open[host] = self._tried(own, host, number, lambda h=host, p=position: made.open(h, hosts, number, p))  # type: ignore[misc]
        self._sources[source] = own

    def draw(self, source: int, number: int, keys: Sequence[Key]) -> dict[int, PortionKind | None]:
        """Read a batch, and if it is as usual place it under these keys: what each portion is like; None: it has ended."""
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
        """Put a batch that was read on the devices."""
        drawn = self._sources[source].drawn.pop(number)
        for each, key in zip(wanted, keys, strict=True):
            portions = {host: np.asarray(leaves[each.leaf]) for host, leaves in drawn.items()}
            boxes = own_boxes(each.kind, self._places.seat)
            self.arrays[key] = on_devices(each.kind, self._places, True)(
                [cut_out(each, box, portions) for box in boxes]
            )

    def bring(self, source: int, number: int, hosts: Sequence[int]) -> dict[int, list[np.ndarray]]:
        """Portions of a batch that was read, as they are."""
        drawn = self._sources[source].drawn.pop(number)
        return {host: [np.asarray(leaf) for leaf in drawn[host]] for host in hosts}

    def positions(self, source: int, number: int, hosts: Sequence[int]) -> dict[int, Any]:
        """Where these portions are when batch `number` is the next."""
        return {host: self._sources[source].open[host].position(number) for host in hosts}

    def close(self, source: int, keys: Sequence[Key]) -> None:
        """Read nothing more of a source, and let go of batches that no step will take."""
        self._sources.pop(source, None)
        for key in keys:
            self.arrays.pop(key, None)

    def _tried(self, own: _Source, host: int, number: int, call: Any) -> Any:
        """What the user's function does; what it raises, with where and for what."""
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
    """What a batch, or a portion of one, is like. NumPy's 64 bits count as what JAX makes of them."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(batch)
    return PortionKind(str(tree), {jax.tree_util.keystr(path): _leaf_kind(leaf) for path, leaf in leaves})


def _leaf_kind(leaf: Any) -> LeafKind:
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    return tuple(np.shape(leaf)), str(jax.dtypes.canonicalize_dtype(dtype))
