"""The driver's side of batches that workers read themselves.

In:     a step on a Ray cluster, the arguments that are the batch, a reader (`worker/reading.py`).
Out:    the kinds of each batch's portions; then its arrays, which are on the workers and were never in this process.
Method: `rows.py` determines the portions that a worker needs. A worker is asked for a batch ahead of time, and reads it beside
        its steps; the arrays are ordinary `RemoteArray`s. A batch of an unusual kind is placed as another plan wants it, or,
        if that plan wants other portions, brought to this process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autopar.grouping import grouped
from autopar.ir.dims import pieces_dim
from autopar.runtime.ray.driver.driver import RayStep
from autopar.runtime.ray.driver.handles import Copy, Part, RemoteArray
from autopar.runtime.ray.rows import Wanted, count_portions, portions_for
from autopar.runtime.ray.worker.reading import PortionKind
from autopar.streams.instructions import MeshId


class Layout:
    """How a batch is distributed: the number of portions, and for each worker its portions and the arrays that it wants."""

    def __init__(self, step: RayStep, first: int, types: Sequence[jax.ShapeDtypeStruct], rows: int):
        """For a batch of arrays of these types with `rows` rows; the first is argument `first` of the step."""
        self.types = tuple(types)
        self.wanted: dict[int, tuple[Wanted, ...]] = {}
        self.meshes: dict[int, MeshId] = {}
        found: dict[MeshId, list[Wanted]] = {}
        for leaf in range(len(types)):
            for mesh, kind, is_piece in step.wanted(first + leaf):
                dim = pieces_dim(types[leaf].shape, kind.shape) if is_piece else 0
                found.setdefault(mesh, []).append(Wanted(leaf, kind, is_piece, dim))
        seats = {seat.number: seat for mesh in sorted(found) for seat in step.workers.seats_on(mesh)}
        for number, seat in seats.items():
            self.wanted[number], self.meshes[number] = tuple(found[seat.mesh]), seat.mesh
        self.hosts = count_portions(rows, [(self.wanted[n], seat) for n, seat in seats.items()])
        self.portions = {n: portions_for(rows, self.hosts, self.wanted[n], seat) for n, seat in seats.items()}

    def fits(self, other: Layout) -> bool:
        """Whether each worker needs the same portions as in `other`."""
        return self.hosts == other.hosts and self.portions == other.portions


class Reading:
    """Batches that the workers of a step read, until `close`.

    `layout`: how batches of the usual kind are distributed.
    """

    def __init__(self, step: RayStep, layout: Layout, kind: PortionKind):
        """Opens nothing yet; `kind`: the usual kind of a portion."""
        self._workers, self.layout, self._kind = step.workers, layout, kind
        self._source = self._workers.number()[0]
        self._begun: dict[int, tuple[dict[int, Any], dict[MeshId, range]]] = {}
        self._keys: dict[int, dict[MeshId, range]] = {}
        self._of_portion: dict[int, int] = {}  # one worker of each portion, to ask about it
        for worker, portions in layout.portions.items():
            for portion in portions:
                self._of_portion.setdefault(portion, worker)

    @property
    def closed(self) -> bool:
        """Whether the workers have ended."""
        return self._workers.closed

    def open(self, reader: bytes, number: int, positions: Sequence[Any]) -> None:
        """Have the workers open their portions by a pickled reader, from batch `number` on, at the position of each portion."""
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
        """Have the workers read a batch; does not wait."""
        if number not in self._begun:
            keys = self._new_keys(self.layout)
            asked = {w: (self._source, number, tuple(keys[mesh])) for w, mesh in self.layout.meshes.items()}
            self._begun[number] = self._workers.begin("readings", "draw", asked), keys

    def drawn(self, number: int) -> dict[int, list[tuple[int, PortionKind | None]]]:
        """Wait for a batch: for each portion, (worker, kind) of each worker that read it; kind None: the portion has ended."""
        self.begin(number)
        refs, self._keys[number] = self._begun.pop(number)
        drawn = self._workers.end_reading(refs, "draw").items()
        found = grouped((portion, (worker, kind)) for worker, own in drawn for portion, kind in own.items())
        return dict(sorted(found.items()))

    def arrays(self, number: int, layout: Layout | None = None) -> list[Any]:
        """The arrays of a batch that was read, on the devices; for an array that no worker wants, its type.

        `layout`: how the batch is distributed, if it is of an unusual kind.
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
        """Copy a batch that was read to this process: the arrays of each portion."""
        del self._keys[number]
        return self._answered("bring", number)

    def positions(self, number: int) -> list[Any]:
        """The position of each portion's source before batch `number`; None: it has none."""
        return self._answered("positions", number)

    def close(self) -> None:
        """Have the workers stop reading, and free what no step will take."""
        if not self._workers.closed:
            left = [*(keys for _, keys in self._begun.values()), *self._keys.values()]
            gone = {w: tuple(k for keys in left for k in keys[mesh]) for w, mesh in self.layout.meshes.items()}
            self._workers.begin("readings", "close", {w: (self._source, own) for w, own in gone.items()})

    def _new_keys(self, layout: Layout) -> dict[MeshId, range]:
        sizes = {mesh: len(layout.wanted[worker]) for worker, mesh in layout.meshes.items()}
        return {mesh: self._workers.number(size) for mesh, size in sizes.items()}

    def _answered(self, method: str, number: int) -> list[Any]:
        """The answer for each portion of a batch, in order, from one worker of each."""
        asked: dict[int, list[int]] = {worker: [] for worker in self.layout.portions}
        for portion, worker in self._of_portion.items():
            asked[worker].append(portion)
        calls = {worker: (self._source, number, tuple(portions)) for worker, portions in asked.items()}
        found = {portion: each for own in self._asked(method, calls).values() for portion, each in own.items()}
        return [found[portion] for portion in sorted(found)]

    def _asked(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        return self._workers.end_reading(self._workers.begin("readings", method, arguments), method)
