"""One part of each batch, as a function of a host's number and the number of hosts reads it.

In:     the user's `batches(host, hosts)`, or `batches(host, hosts, start)`.
Out:    `PartReader`, which goes to the workers and opens parts there; `PartOfBatches`, a part being read.
Method: what the function returns is a source as any other: one that knows its position goes back there, of others batches
        are drawn and dropped (`positions.py`).
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from autopar.fit.batches import Batches
from autopar.fit.positions import as_arrays, has_position, iterator_after, iterator_at, position_of

ByHost = Callable[..., Iterable[Any]]
"""`(host, hosts)` or `(host, hosts, start)` to the host's part of each batch, from number `start` on if it takes one."""


def is_by_host(source: Any) -> bool:
    """Whether it is a function of a host and the number of hosts: by the names of its parameters."""
    try:
        names = list(inspect.signature(source).parameters) if callable(source) else []
    except (TypeError, ValueError):  # of a builtin that tells none
        return False
    return names[:2] == ["host", "hosts"] and names[2:] in ([], ["start"])


class PartReader:
    """Opens parts of batches; goes to the workers."""

    def __init__(self, function: ByHost, every: int):
        """Opens nothing; at multiples of `every` it is known where the source was."""
        self._function, self._every = function, every
        self._begins_anywhere = "start" in inspect.signature(function).parameters

    def open(self, host: int, hosts: int, number: int, position: Any | None = None) -> PartOfBatches:
        """Part `host` of `hosts`, from batch `number` on, where the source is at a position."""
        if self._begins_anywhere:
            return PartOfBatches(None, iter(self._function(host, hosts, number)), number, self._every)
        source = self._function(host, hosts)
        iterator = iterator_at(source, position) if position is not None else None
        if iterator is not None:
            return PartOfBatches(source, iterator, number, self._every)
        iterator, first = iterator_after(source, number)
        for _ in itertools.islice(iterator, number - first):
            pass
        return PartOfBatches(source, iterator, number, self._every)

    def here(self, **options: Any) -> Batches:
        """All of the batches, in one part, read in this process."""
        if self._begins_anywhere:
            return Batches(lambda start: iter(self._function(0, 1, start)), **options)
        source = self._function(0, 1)
        if iter(source) is source and not has_position(source):
            source = _Again(lambda: self._function(0, 1))
        return Batches(source, **options)


class _Again:
    """What is begun anew each time."""

    def __init__(self, make: Callable[[], Iterable[Any]]):
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


class PartOfBatches:
    """One part of each batch, one after the other; owns the iterator over them."""

    def __init__(self, source: Any, iterator: Iterator[Any], number: int, every: int):
        self._source, self._iterator, self._next, self._every = source, iterator, number, every
        self._positions: dict[int, Any] = {}
        self._has_ended = False

    def at(self, number: int) -> Any | None:
        """The part of batch `number`, which is the next; None: there is none."""
        assert number == self._next or self._has_ended, "batches are read in order"
        if self._has_ended:
            return None
        if number % self._every == 0:
            self._positions = {number: self._told()}
        try:
            batch = as_arrays(next(self._iterator))
        except StopIteration:
            self._has_ended = True  # which is no place to go on from: a loader would begin again
            self._positions.pop(number, None)
            return None
        self._next += 1
        return batch

    def position(self, number: int) -> Any | None:
        """Where the source is when batch `number` is the next, as JSON; None: it cannot tell."""
        return self._told() if number == self._next and not self._has_ended else self._positions.get(number)

    def _told(self) -> Any | None:
        return None if self._source is None else position_of(self._source, self._iterator)
