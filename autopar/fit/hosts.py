"""Gives batches by number, of which each host of a cluster reads its own portion.

In:     the user's `batches(host, hosts)`, or `batches(host, hosts, start)`, and the step that takes the batches.
Out:    the batch of a step, as in `Batches`. On a Ray cluster its arrays are never in this process.
Method: this process reads the first batch, whole, to know its types for planning. The plan determines the number of portions
        (`runtime/ray/rows.py`); each worker opens its portions, and reads ahead beside its steps. In one process there is
        one portion, read like any other source.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from autopar.compiled import CompiledStep
from autopar.errors import BatchError
from autopar.fit.batches import Batches, EndOfBatches
from autopar.fit.portions import ByHost, PortionReader
from autopar.fit.remainder import Remainder, check_remainder, rows_of, whole
from autopar.fit.state import type_of
from autopar.follow import Following
from autopar.ir.trace.state import arguments_of
from autopar.runtime.ray.driver.driver import RayStep
from autopar.runtime.ray.driver.reading import Layout, Reading
from autopar.runtime.ray.functions import packed
from autopar.runtime.ray.worker.reading import PortionKind, kind_of
from autopar.step import ParallelStep


def batches(
    function: ByHost, step: ParallelStep | Following, state: Any, *, prefetch: int = 1, remainder: Remainder = "keep"
) -> Iterator[Any]:
    """Batches for a loop of your own, of which each host of a Ray cluster reads its own portion.

    Args:
        function: `function(host, hosts)` returns portion `host` of each batch, of `hosts` consecutive portions; as in
            `fit`.
        step: The step that takes the batches as its last argument; made by `parallelize` or `follow`.
        state: The argument before the batch, or its types.
        prefetch: Number of batches that the hosts read ahead.
        remainder: As in `fit`.

    Yields:
        Batches to pass to the step. On a Ray cluster their arrays are on the workers: `np.asarray` fetches one.

    Raises:
        BatchError: The portions of a batch do not fit together, `remainder` forbids its rows, or a portion could not be
            read.
    """
    check_remainder(remainder)
    feed = HostBatches(function, remainder=remainder, ahead=prefetch)
    feed.serve(step, jax.tree.map(type_of, state))
    try:
        for number in itertools.count():
            try:
                batch = feed.at(number)
            except EndOfBatches:
                return
            yield batch
            del batch
            feed.forget(number)
    finally:
        feed.close()


class HostBatches:
    """Batches by number, read in the portions that the plan wants; as `Batches`.

    `rows`: number of rows of a whole batch.
    """

    def __init__(
        self,
        function: ByHost,
        *,
        stop: int | None = None,
        remainder: Remainder = "keep",
        every: int = 1,
        ahead: int = 1,
    ):
        """Reads nothing yet. `ahead`: number of batches that workers read ahead; other arguments as in `Batches`."""
        self._reader, self._stop, self._remainder, self._ahead = PortionReader(function, every), stop, remainder, ahead
        self._name = getattr(function, "__name__", "batches")
        self._every = every
        self._like: Any = None
        self._compiled: Callable[[Any], CompiledStep] | None = None
        self._reading: Reading | None = None
        self._back: dict[int, Any] = {}
        self._next = 0
        self._start: Any | None = None
        self.rows: int | None = None

    @functools.cached_property
    def _here(self) -> Batches:
        """The whole batches, for a step of this process."""
        return self._reader.here(stop=self._stop, remainder=self._remainder, every=self._every)

    def serve(self, step: Any, state: Any) -> None:
        """Give batches to this step from now on; `state`: the types of its state."""
        self.close()
        on_ray = isinstance(step, ParallelStep | Following) and step.cluster.machine is not None
        self._compiled = (lambda batch: step.compiled(state, batch)) if on_ray else None

    def at(self, number: int) -> Any:
        """As in `Batches`.

        Raises:
            BatchError: The portions of a batch do not fit together, `remainder` forbids its rows, or a portion could not be
                read.
            WorkerError: A worker failed while it read.
        """
        if number in self._back:
            return self._back.pop(number)
        if self._compiled is None:
            found = self._here.at(number)
            self.rows = self._here.rows
            return found
        if self._stop is not None and number >= self._stop:
            raise EndOfBatches
        reading = self._opened(number)
        drawn = reading.drawn(number)
        self._next = number + 1
        for later in range(number + 1, number + 1 + self._ahead):
            if self._stop is None or later < self._stop:
                reading.begin(later)
        kind = self._checked(drawn, number)
        if kind == self._portion_kind:
            return jax.tree.unflatten(self._tree, reading.arrays(number))
        return self._unlike(reading, kind, number)

    def fetch_ahead(self, numbers: Iterable[int], place: Callable[[Any], Any]) -> None:
        """As in `Batches`; workers read ahead by themselves."""
        if self._compiled is None:
            self._here.fetch_ahead(numbers, place)

    def put_back(self, number: int, batch: Any) -> None:
        """As in `Batches`."""
        self._back[number] = batch

    def position(self, number: int) -> Any | None:
        """As in `Batches`: the number of portions, and the position of each."""
        if self._compiled is None:
            found = [self._here.position(number)]
        elif self._reading is not None and not self._reading.closed:
            found = self._reading.positions(number)
        else:
            return self._start if number == self._next else None
        return None if None in found else {"hosts": len(found), "parts": found}

    def go_to(self, number: int, position: Any | None = None, rows: int | None = None) -> None:
        """As in `Batches`; positions of another number of portions are not used: batches are drawn and dropped."""
        self.close()
        self._back.clear()
        self._next, self._start, self.rows = number, position, self.rows or rows
        own = _portions_of(position, 1)
        if self._compiled is None:
            self._here.go_to(number, None if own is None else own[0], rows)

    def forget(self, number: int) -> None:
        """As in `Batches`."""
        if self._compiled is None:
            self._here.forget(number)

    def close(self) -> None:
        """Have the workers stop reading."""
        if self._reading is not None:
            self._reading.close()
        self._reading = None

    def _opened(self, number: int) -> Reading:
        if self._reading is None or self._reading.closed or number != self._next:
            assert self._compiled is not None
            self.close()
            self._look()
            step, layout = self._laid_out(self._like)
            self._portion_kind = _with_rows(self._kind, lambda rows: rows // layout.hosts)
            reading = Reading(step, layout, self._portion_kind)
            start = _portions_of(self._start, layout.hosts) if number == self._next else None
            reading.open(packed(self._reader, self._name), number, start or [None] * layout.hosts)
            self._reading, self._start = reading, None
        return self._reading

    def _look(self) -> None:
        """Read the first batch, once, to know its types for planning."""
        if self._like is not None:
            return
        first = self._reader.open(0, 1, 0).at(0)
        if first is None:
            raise EndOfBatches
        self._kind, self._tree, self.rows = kind_of(first), jax.tree.structure(first), rows_of(first)
        if self.rows is None:
            raise BatchError(
                "a batch that hosts read in portions must have rows.",
                given=f"{self._name}(host=0, hosts=1): {_shapes(self._kind)}",
                wrong="its arrays do not share their leading dim.",
                do="let them; numbers may stand beside them, and must be the same on each host.",
            )
        self._like = self._types(self._kind)

    def _types(self, kind: PortionKind) -> Any:
        leaves = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in kind.leaves.values()]
        return jax.tree.unflatten(self._tree, leaves)

    def _laid_out(self, like: Any) -> tuple[RayStep, Layout]:
        """The step compiled for a batch of these types, and how that batch is distributed."""
        assert self._compiled is not None
        compiled = self._compiled(like)
        step, program = compiled.executable, compiled.program
        assert isinstance(step, RayStep), "a step on a Ray cluster"
        _, first, _ = arguments_of(program)[len(program.in_tree.children()[0].children()) - 1]
        rows = rows_of(like)
        assert rows is not None, "it has rows, or `_look` refuses it"
        return step, Layout(step, first, jax.tree.leaves(like), rows)

    def _checked(self, drawn: Mapping[int, Sequence[tuple[int, PortionKind | None]]], number: int) -> PortionKind:
        """The kind of all portions of a batch.

        Raises:
            EndOfBatches: The batches have ended, or this one is dropped.
            BatchError: The kinds differ; says whose.
        """
        usual, first = self._portion_kind, drawn[0][0][1]
        kinds = [(host, worker, kind) for host, own in drawn.items() for worker, kind in own]
        if all(kind is None for _, _, kind in kinds):
            raise EndOfBatches
        is_rest = all(kind is None or _is_shorter(kind, usual) for _, _, kind in kinds if kind != usual)
        if self._remainder == "drop" and any(kind is not None and kind != usual for _, _, kind in kinds) and is_rest:
            raise EndOfBatches
        if first is not None and all(kind == first for _, _, kind in kinds):
            return first
        odd = next((k for k in kinds if k[2] != usual), kinds[0])
        other = next(k for k in kinds if k[2] != odd[2])
        hosts = len(drawn)
        raise BatchError(
            "the portions of a batch that hosts read do not fit together.",
            given=f"the batch of step {number}: {self._name}(host={odd[0]}, hosts={hosts}), on worker {odd[1]}, has "
            f"{_shapes(odd[2])}; {self._name}(host={other[0]}, hosts={hosts}), on worker {other[1]}, has {_shapes(other[2])}",
            wrong="each host must have as many batches as the others, of the same arrays and shapes.",
            do='give each the same number of rows, and of batches; or pass remainder="drop", where only the last is smaller.',
        )

    def _unlike(self, reading: Reading, kind: PortionKind, number: int) -> Any:
        """A batch of other shapes than the first: placed as its own plan wants it, or copied to this process."""
        if kind.tree != self._kind.tree:
            raise BatchError(
                "a batch has another structure than the first.",
                given=f"the batch of step {number}: {_shapes(kind)}; the first: {_shapes(self._kind)}",
                wrong="a step whose hosts read their own portions is planned for one structure.",
                do="let all batches have the same containers.",
            )
        hosts = reading.layout.hosts
        like = self._types(_with_rows(kind, lambda rows: rows * hosts))
        if rows_of(like) == self.rows or self._remainder == "keep":
            _, layout = self._laid_out(like)
            if layout.fits(reading.layout):
                return jax.tree.unflatten(self._tree, reading.arrays(number, layout))
        portions = reading.bring(number)
        leaves = [np.concatenate(own) if own[0].ndim else own[0] for own in zip(*portions, strict=True)]
        made = whole(jax.tree.unflatten(self._tree, leaves), self.rows, self._remainder, number)
        if made is None:
            raise EndOfBatches
        return made


def _portions_of(position: Any, hosts: int) -> list[Any] | None:
    """The positions of `hosts` portions; None: there are none, or of another number of portions."""
    return position["parts"] if isinstance(position, dict) and position.get("hosts") == hosts else None


def _with_rows(kind: PortionKind, change: Callable[[int], int]) -> PortionKind:
    """The kind with another number of rows."""
    leaves = kind.leaves.items()
    return PortionKind(
        kind.tree, {path: ((*map(change, shape[:1]), *shape[1:]), dtype) for path, (shape, dtype) in leaves}
    )


def _is_shorter(kind: PortionKind, usual: PortionKind) -> bool:
    """Whether a portion has fewer rows than usual, and is otherwise of the usual kind."""
    without = lambda of: [(path, shape[1:], bool(shape), dtype) for path, (shape, dtype) in of.leaves.items()]  # noqa: E731
    rows = lambda of: next((shape[0] for shape, _ in of.leaves.values() if shape), 0)  # noqa: E731
    return kind.tree == usual.tree and without(kind) == without(usual) and rows(kind) < rows(usual)


def _shapes(kind: PortionKind | None) -> str:
    if kind is None:
        return "ended"
    return ", ".join(
        f"{path or 'an array'} {dtype}{list(shape)}" for path, (shape, dtype) in [*kind.leaves.items()][:6]
    )
