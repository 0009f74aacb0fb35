"""Batches of which each host of a cluster reads its own portion: a function of a host's number and the number of hosts.

In:     `batches(host, hosts)`, or `batches(host, hosts, start)`, and the step that takes them.
Out:    as of `Batches`, the batch of a step by its number. On a Ray cluster its arrays never were in this process.
Method: the first batch is read here, whole, to know what is to be planned for. The plan says in how many portions a batch is
        cut over the workers (`runtime/ray/rows.py`); each worker opens its portions, and reads ahead while it goes on with its
        steps. In one process there is one portion, read as any other source is.
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
        function: `function(host, hosts)` gives portion `host` of each batch, which is cut into `hosts` portions one below the
            other; as of `fit`.
        step: Takes them, as its last argument: made by `parallelize` or `follow`.
        state: What it takes before, of the types that it is always called with.
        prefetch: How many batches the hosts read ahead.
        remainder: As of `fit`.

    Yields:
        Batches to pass to the step. On a Ray cluster their arrays are on the workers: `np.asarray` fetches one.

    Raises:
        BatchError: The portions of a batch do not fit together, or its rows are not wanted; one could not be read.
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
    """Batches by number, each in the portions that the plan wants; as of `Batches`.

    Attributes:
        rows: Of a whole batch.
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
        """Reads nothing. `ahead` is how many batches workers read ahead; the others are as of `Batches`."""
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
        """All of them in one portion, for a step of this process."""
        return self._reader.here(stop=self._stop, remainder=self._remainder, every=self._every)

    def serve(self, step: Any, state: Any) -> None:
        """They are for this step now, and a state of such types."""
        self.close()
        on_ray = isinstance(step, ParallelStep | Following) and step.cluster.machine is not None
        self._compiled = (lambda batch: step.compiled(state, batch)) if on_ray else None

    def at(self, number: int) -> Any:
        """As of `Batches`.

        Raises:
            BatchError: The portions of a batch do not fit together, or its rows are not wanted; one could not be read.
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
        """As of `Batches`; workers have begun to read already."""
        if self._compiled is None:
            self._here.fetch_ahead(numbers, place)

    def put_back(self, number: int, batch: Any) -> None:
        """As of `Batches`."""
        self._back[number] = batch

    def position(self, number: int) -> Any | None:
        """As of `Batches`: where each portion is, and of how many."""
        if self._compiled is None:
            found = [self._here.position(number)]
        elif self._reading is not None and not self._reading.closed:
            found = self._reading.positions(number)
        else:
            return self._start if number == self._next else None
        return None if None in found else {"hosts": len(found), "parts": found}

    def go_to(self, number: int, position: Any | None = None, rows: int | None = None) -> None:
        """As of `Batches`; portions of another number than now go nowhere: they are drawn and dropped."""
        self.close()
        self._back.clear()
        self._next, self._start, self.rows = number, position, self.rows or rows
        own = _portions_of(position, 1)
        if self._compiled is None:
            self._here.go_to(number, None if own is None else own[0], rows)

    def forget(self, number: int) -> None:
        """As of `Batches`."""
        if self._compiled is None:
            self._here.forget(number)

    def close(self) -> None:
        """Have the workers read nothing more."""
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
        """Read the first batch, once, to know what is to be planned for."""
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
        """The step as it is compiled for such a batch, and where that goes."""
        assert self._compiled is not None
        compiled = self._compiled(like)
        step, program = compiled.executable, compiled.program
        assert isinstance(step, RayStep), "a step on a Ray cluster"
        _, first, _ = arguments_of(program)[len(program.in_tree.children()[0].children()) - 1]
        rows = rows_of(like)
        assert rows is not None, "it has rows, or `_look` refuses it"
        return step, Layout(step, first, jax.tree.leaves(like), rows)

    def _checked(self, drawn: Mapping[int, Sequence[tuple[int, PortionKind | None]]], number: int) -> PortionKind:
        """What every portion of a batch is like.

        Raises:
            EndOfBatches: There are not so many, or what there is of this one is dropped.
            BatchError: They are not alike; says whose.
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
        """A batch of other shapes than the first: put where its own plan wants it, or brought here."""
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
    """The positions of so many portions; None: there are none, or of another number."""
    return position["parts"] if isinstance(position, dict) and position.get("hosts") == hosts else None


def _with_rows(kind: PortionKind, change: Callable[[int], int]) -> PortionKind:
    """The same with another number of rows."""
    leaves = kind.leaves.items()
    return PortionKind(
        kind.tree, {path: ((*map(change, shape[:1]), *shape[1:]), dtype) for path, (shape, dtype) in leaves}
    )


def _is_shorter(kind: PortionKind, usual: PortionKind) -> bool:
    """Whether it is a portion with fewer rows, and otherwise like the others."""
    without = lambda of: [(path, shape[1:], bool(shape), dtype) for path, (shape, dtype) in of.leaves.items()]  # noqa: E731
    rows = lambda of: next((shape[0] for shape, _ in of.leaves.values() if shape), 0)  # noqa: E731
    return kind.tree == usual.tree and without(kind) == without(usual) and rows(kind) < rows(usual)


def _shapes(kind: PortionKind | None) -> str:
    if kind is None:
        return "ended"
    return ", ".join(
        f"{path or 'an array'} {dtype}{list(shape)}" for path, (shape, dtype) in [*kind.leaves.items()][:6]
    )
