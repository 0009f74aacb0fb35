"""Batches by number, so that a run that begins again in the middle sees what an undisturbed one would have seen.

In:     a list; anything that can be iterated over again; an iterator; or a function from a number to an iterator that
        begins there.
Out:    the batch of a step.
Method: a function is asked for the place; of everything else that is no list, the batches before it are drawn and dropped.
        An iterator cannot be begun again, so what it gave is kept until no one can want it any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from autopar.errors import CheckpointError

Source = Iterable[Any] | Callable[[int], Iterator[Any]]


class EndOfBatches(Exception):
    """There is no batch of this number."""


class Batches:
    """Batches by number; owns the iterator over them."""

    def __init__(self, source: Source):
        self._source = source
        self._once = not callable(source) and iter(source) is source
        self._iterator: Iterator[Any] | None = None
        self._next = 0
        self._kept: deque[Any] = deque()

    def at(self, number: int) -> Any:
        """The batch of step `number`, counted from 0.

        Raises:
            EndOfBatches: There are not so many.
            CheckpointError: It has been given out already, by an iterator, and is not kept any more.
        """
        if isinstance(self._source, Sequence):
            if number >= len(self._source):
                raise EndOfBatches
            return self._source[number]
        first = self._next - len(self._kept)
        if first <= number < self._next:
            return self._kept[number - first]
        if number < self._next and self._once:
            raise CheckpointError(
                "batches that are gone are needed again.",
                given=f"an iterator, {self._next} batches drawn",
                wrong=f"the run goes on from step {number}, and an iterator cannot be begun again.",
                do="pass a list, a dataset that can be iterated over again, or a function from a step's number to an "
                "iterator.",
                path="",
            )
        if self._iterator is None or number < self._next:
            self._begin(number)
        while True:
            batch = self._draw()
            if self._next > number:
                return batch

    def forget(self, number: int) -> None:
        """Batches before this one will not be asked for again."""
        while self._kept and self._next - len(self._kept) < number:
            self._kept.popleft()

    def _begin(self, number: int) -> None:
        if callable(self._source):
            self._iterator, self._next = iter(self._source(number)), number
        else:
            self._iterator, self._next = iter(self._source), 0

    def _draw(self) -> Any:
        assert self._iterator is not None
        try:
            batch = next(self._iterator)
        except StopIteration:
            raise EndOfBatches from None
        self._next += 1
        if self._once:
            self._kept.append(batch)
        return batch
