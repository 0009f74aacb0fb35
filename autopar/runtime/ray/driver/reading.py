"""Batches that the workers of a step read by themselves, as the driver sees them.

In:     a step on a Ray cluster, which of its arguments are the batch, a reader (`worker/reading.py`).
Out:    for each batch what its portions are like; then its arrays, which are on the workers and never were here.
Method: `rows.py` says which portions a worker needs. It is asked for a batch ahead of time, and reads it while it goes on with
        its steps; what becomes of it are `RemoteArray`s like others. A batch that is unlike the others is put where another
        plan wants it, or, where that wants other portions, brought here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autopar.runtime.ray.driver.driver import RayStep
from autopar.runtime.ray.driver.handles import Copy, Part, RemoteArray
from autopar.runtime.ray.rows import Wanted, count_portions, portions_for
from autopar.runtime.ray.worker.reading import PortionKind
from autopar.streams.instructions import MeshId


class Layout:
    """Where a batch goes: in how many portions it is cut, and of each worker that holds some of it its arrays and portions."""

    def __init__(self, step: RayStep, first: int, types: Sequence[jax.ShapeDtypeStruct], rows: int):
        """Find it out for a batch of such arrays and rows, whose first is argument `first` of the step."""
        self.types = tuple(types)
        self.wanted: dict[int, tuple[Wanted, ...]] = {}
        self.meshes: dict[int, MeshId] = {}
        found: dict[MeshId, list[Wanted]] = {}
        for leaf in range(len(types)):
            for mesh, kind, is_piece in step.wanted(first + leaf):
                found.setdefault(mesh, []).append(Wanted(leaf, kind, is_piece))
        seats = {seat.number: seat for mesh in sorted(found) for seat in step.workers.seats_on(mesh)}
        for number, seat in seats.items():
            self.wanted[number], self.meshes[number] = tuple(found[seat.mesh]), seat.mesh
        self.hosts = count_portions(rows, [(self.wanted[n], seat) for n, seat in seats.items()])
        self.portions = {n: portions_for(rows, self.hosts, self.wanted[n], seat) for n, seat in seats.items()}

    def fits(self, other: Layout) -> bool:
        """Whether each worker has read the portions that it needs, if it has read those of another."""
        return self.hosts == other.hosts and self.portions == other.portions


class Reading:
    """Batches being read by the workers of a step; tells them when no one wants more.

    Attributes:
        layout: Where they go, as they usually are.
    """

    def __init__(self, step: RayStep, layout: Layout, kind: PortionKind):
        """Opens nothing; `kind` is of a portion."""
        self._workers, self.layout, self._kind = step.workers, layout, kind
        self._source = self._workers.number()[0]
        self._begun: dict[int, tuple[dict[int, Any], dict[MeshId, range]]] = {}
        self._keys: dict[int, dict[MeshId, range]] = {}
        self._of_portion: dict[int, int] = {}  # the worker that answers for a portion
        for worker, portions in layout.portions.items():
            for portion in portions:
                self._of_portion.setdefault(portion, worker)

    @property
    def closed(self) -> bool:
        """Whether the workers have ended."""
        return self._workers.closed

    def open(self, reader: bytes, number: int, positions: Sequence[Any]) -> None:
        """Have the workers open their portions by a packed reader, from batch `number` on, each where it is at its position."""
        arguments = {
            worker: (
                self._source,
                reader,
                self.layout.hosts,
                number,
                {portion: positions[portion] for portion in portions},
                self._kind,
                self.layout.wanted[worker],
            )
            for worker, portions in self.layout.portions.items()
        }
        self._asked("open", arguments)

    def begin(self, number: int) -> None:
        """Have a batch read; waits for nothing."""
        if number not in self._begun:
            keys = self._new_keys(self.layout)
            asked = {w: (self._source, number, tuple(keys[mesh])) for w, mesh in self.layout.meshes.items()}
            self._begun[number] = self._workers.begin("readings", "draw", asked), keys

    def drawn(self, number: int) -> dict[int, list[tuple[int, PortionKind | None]]]:
        """A batch, once it is read: for each portion what each worker that has read it says it is like; None: it has ended."""
        self.begin(number)
        refs, self._keys[number] = self._begun.pop(number)
        found: dict[int, list[tuple[int, PortionKind | None]]] = {}
        for worker, own in self._workers.end_reading(refs, "draw").items():
            for portion, kind in own.items():
                found.setdefault(portion, []).append((worker, kind))
        return dict(sorted(found.items()))

    def arrays(self, number: int, layout: Layout | None = None) -> list[Any]:
        """The arrays of a batch that was read, in their places; of one that no worker holds, its type.

        `layout` is where it goes, if it is unlike the others.
        """
        keys = self._keys.pop(number)
        if layout is not None:
            keys = self._new_keys(layout)
            placed = {w: (self._source, number, layout.wanted[w], tuple(keys[m])) for w, m in layout.meshes.items()}
            self._asked("place", placed)
        layout = layout or self.layout
        copies: list[list[Copy]] = [[] for _ in layout.types]
        for mesh, worker in {mesh: worker for worker, mesh in layout.meshes.items()}.items():
            for each, key in zip(layout.wanted[worker], keys[mesh], strict=True):
                copies[each.leaf].append(Copy(self._workers, mesh, each.kind, key))
        return [
            RemoteArray([Part(tuple(own))], shape=tuple(kind.shape)) if own else kind
            for own, kind in zip(copies, layout.types, strict=True)
        ]

    def bring(self, number: int) -> list[list[np.ndarray]]:
        """The portions of a batch that was read, each with its arrays, in this process."""
        del self._keys[number]
        return self._answered("bring", number)

    def positions(self, number: int) -> list[Any]:
        """Where each portion is when batch `number` is the next; None: it cannot tell."""
        return self._answered("positions", number)

    def close(self) -> None:
        """Have the workers read nothing more, and drop what no step will take."""
        if not self._workers.closed:
            left = [*(keys for _, keys in self._begun.values()), *self._keys.values()]
            gone = {w: tuple(k for keys in left for k in keys[mesh]) for w, mesh in self.layout.meshes.items()}
            self._workers.begin("readings", "close", {w: (self._source, own) for w, own in gone.items()})

    def _new_keys(self, layout: Layout) -> dict[MeshId, range]:
        sizes = {mesh: len(layout.wanted[worker]) for worker, mesh in layout.meshes.items()}
        return {mesh: self._workers.number(size) for mesh, size in sizes.items()}

    def _answered(self, method: str, number: int) -> list[Any]:
        """What is said of each portion of a batch, in order, by the worker that answers for it."""
        asked: dict[int, list[int]] = {worker: [] for worker in self.layout.portions}
        for portion, worker in self._of_portion.items():
            asked[worker].append(portion)
        calls = {worker: (self._source, number, tuple(portions)) for worker, portions in asked.items()}
        found = {portion: each for own in self._asked(method, calls).values() for portion, each in own.items()}
        return [found[portion] for portion in sorted(found)]

    def _asked(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        return self._workers.end_reading(self._workers.begin("readings", method, arguments), method)
