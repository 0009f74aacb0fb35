"""Gives batches by number, so that a resumed run sees the same batches as an uninterrupted one; moves them ahead of time.

In:     a list; an iterable that can be iterated over again; an iterator; or a function from a number to an iterator that
        starts there.
Out:    the batch of a step, perhaps fetched ahead, its arrays perhaps still in transit to the shardings of the step.
Method: to start at a number, a function is called with it, a loader restores its position (`positions.py`), and for other
        sources except lists the earlier batches are drawn and dropped. An iterator cannot be restarted, so its batches are
        kept while they may be needed again. Batches are drawn ahead by the training thread, while the devices work, so that
        a loader sees the context that the user's program has set. A batch of the same types as the last one is moved to the
        same shardings meanwhile. The step itself moves what is not a NumPy array, or would change its dtype, or is for
        workers, or is donated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from autopar.errors import CheckpointError
from autopar.fit.positions import as_arrays, has_position, iterator_after, iterator_at, position_of
from autopar.fit.remainder import Remainder, rows_of, whole
from autopar.ir.trace.state import argument_slices
from autopar.step import ParallelStep

Source = Iterable[Any] | Callable[[int], Iterator[Any]]


class EndOfBatches(Exception):
    """There is no batch of this number: the batches have ended."""


class Batches:
    """Batches by number; owns the iterator over the source."""

    def __init__(self, source: Source, *, stop: int | None = None, remainder: Remainder = "keep", every: int = 1):
        """Draws nothing yet.

        `stop`: the most batches to draw; None: all. `every`: the position of the source is recorded at multiples of it.
        `remainder`: how to treat a batch with fewer rows than the first.
        """
        self._source, self._stop, self._remainder, self._every = source, stop, remainder, every
        self._by_index = isinstance(source, Sequence) and remainder != "drop"
        self._once = not callable(source) and not has_position(source) and iter(source) is source
        self._iterator: Iterator[Any] | None = None
        self._next = 0
        self._end: int | None = None
        self._kept: deque[Any] = deque()
        self._ahead: dict[int, Any] = {}
        self._positions: dict[int, Any] = {}
        self.rows: int | None = None

    def at(self, number: int) -> Any:
        """The batch of step `number`, counted from 0.

        Raises:
            EndOfBatches: The batches have ended.
            CheckpointError: It was drawn from an iterator before, and is not kept any more.
            BatchError: It has another number of rows than the first, which `remainder` forbids.
        """
        if number in self._ahead:
            return self._ahead.pop(number)
        return self._found(number)

    def fetch_ahead(self, numbers: Iterable[int], place: Callable[[Any], Any]) -> None:
        """Draw the batches that are needed next, if there are any, and let `place` start to move them."""
        for number in numbers:
            if number not in self._ahead:
                try:
                    self._ahead[number] = place(self._found(number))
                except EndOfBatches:
                    return

    def put_back(self, number: int, batch: Any) -> None:
        """Return a batch that was only inspected: `at` gives it again."""
        self._ahead[number] = batch

    def position(self, number: int) -> Any | None:
        """The position of the source before batch `number`, for `go_to`; None: it has none, or has ended."""
        if number == self._next and self._iterator is not None and self._end is None and not callable(self._source):
            return position_of(self._source, self._iterator)
        return self._positions.get(number)

    def go_to(self, number: int, position: Any | None = None, rows: int | None = None) -> None:
        """Make batch `number` the next.

        `position`: of the source there, as `position` returned it. `rows`: of a whole batch; None: as many as the first
        batch that is drawn has.
        """
        self._ahead.clear()
        self.rows = self.rows or rows
        if position is not None and number != self._next and not callable(self._source):
            iterator = iterator_at(self._source, position)
            if iterator is not None:
                self._iterator, self._next, self._end = iterator, number, None

    def forget(self, number: int) -> None:
        """Drop batches before this one, which will not be needed again."""
        while self._kept and self._next - len(self._kept) < number:
            self._kept.popleft()
        self._positions = {n: position for n, position in self._positions.items() if n >= number}

    def _found(self, number: int) -> Any:
        if self._stop is not None and number >= self._stop:
            raise EndOfBatches
        if self._by_index:
            assert isinstance(self._source, Sequence)
            if number >= len(self._source):
                raise EndOfBatches
            if self.rows is None:
                self.rows = rows_of(self._source[0])
            return whole(as_arrays(self._source[number]), self.rows, self._remainder, number)
        first = self._next - len(self._kept)
        if first <= number < self._next:
            return self._kept[number - first]
        if number < self._next and self._once:
            raise CheckpointError(
                "batches that are gone are needed again.",
                given=f"an iterator, {self._next} batches drawn",
                wrong=f"the run goes on from step {number}, and an iterator cannot be begun again.",
                do="pass a list, a dataset that can be iterated over again, a loader that knows its position, or a function "
                "from a step's number to an iterator.",
            )
        if self._iterator is None or number < self._next:
            self._begin(number)
        while True:
            batch = self._draw()
            if self._next > number:
                return batch

    def _begin(self, number: int) -> None:
        self._end = None
        if callable(self._source):
            self._iterator, self._next = iter(self._source(number)), number
        else:
            self._iterator, self._next = iterator_after(self._source, number if self._remainder != "drop" else 0)

    def _draw(self) -> Any:
        assert self._iterator is not None
        if self._end is not None:
            raise EndOfBatches
        if self._next % self._every == 0 and not callable(self._source):
            self._positions[self._next] = position_of(self._source, self._iterator)
        made = None
        while made is None:
            try:
                batch = as_arrays(next(self._iterator))
            except StopIteration:
                self._end = self._next  # a loader restored to this position would start again
                self._positions.pop(self._next, None)
                raise EndOfBatches from None
            self.rows = self.rows or rows_of(batch)
            made = whole(batch, self.rows, self._remainder, self._next)
            if made is None and callable(
                self._source
            ):  # which counts it: were it left out, others would have its number
                self._end = self._next
                raise EndOfBatches
        self._next += 1
        if self._once:
            self._kept.append(made)
        return made


def placed_for(step: Any, last: Any) -> Callable[[Any], Any]:
    """A function that starts to move a batch like `last` to where the step wants it; the identity if that is not known."""
    compiled = step.latest() if isinstance(step, ParallelStep) else None
    if compiled is None or compiled.executable.is_remote:
        return lambda batch: batch
    program, tree = compiled.program, jax.tree.structure(last)
    arguments = program.in_tree.children()[0].children()
    if not arguments or arguments[-1] != tree:
        return lambda batch: batch
    first, stop = argument_slices(program)[len(arguments) - 1]
    if any(compiled.plan.attached.roles.donated[first:stop]):  # a placed array may share memory with the user's
        return lambda batch: batch
    shardings = compiled.executable.in_shardings[first:stop]
    types = [_type_of(leaf) for leaf in jax.tree.leaves(last)]
    if [aval.shape for aval in program.in_avals[first:stop]] != [shape for shape, _ in types]:
        return lambda batch: batch  # it was compiled last for other batches

    def place(batch: Any) -> Any:
        leaves, found = jax.tree.flatten(batch)
        if found != tree or [_type_of(leaf) for leaf in leaves] != types:
            return batch
        moved = [
            k
            for k, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True))
            if isinstance(leaf, np.ndarray)
            and isinstance(sharding, jax.sharding.Sharding)
            and jax.dtypes.canonicalize_dtype(leaf.dtype) == leaf.dtype
        ]
        arrays = jax.device_put([leaves[k] for k in moved], [shardings[k] for k in moved])
        for k, array in zip(moved, arrays, strict=True):
            leaves[k] = array
        return tree.unflatten(leaves)

    return place


def _type_of(leaf: Any) -> Any:
    return np.shape(leaf), getattr(leaf, "dtype", type(leaf))
