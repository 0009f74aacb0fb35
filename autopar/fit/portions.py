"""One portion of each batch, as a function of a host's number and the number of hosts reads it.

In:     the user's `batches(host, hosts)`, or `batches(host, hosts, start)`.
Out:    `PortionReader`, which goes to the workers and opens portions there; `PortionOfBatches`, a portion being read.
Method: what the function returns is a source as any other (`batches.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from autopar.fit.batches import Batches, EndOfBatches
from autopar.fit.positions import has_position

ByHost = Callable[..., Iterable[Any]]
"""`(host, hosts)` or `(host, hosts, start)` to the host's portion of each batch, from number `start` on if it takes one."""


def is_by_host(source: Any) -> bool:
    """Whether it is a function of a host and the number of hosts: by the names of its parameters."""
    try:
        names = list(inspect.signature(source).parameters) if callable(source) else []
    except (TypeError, ValueError):  # of a builtin that tells none
        return False
    return names[:2] == ["host", "hosts"] and names[2:] in ([], ["start"])


class PortionReader:
    """Opens portions of batches; goes to the workers."""

    def __init__(self, function: ByHost, every: int):
        """Opens nothing; at multiples of `every` it is known where the source was."""
        self._function, self._every = function, every
        self._begins_anywhere = "start" in inspect.signature(function).parameters

    def open(self, host: int, hosts: int, number: int, position: Any | None = None) -> PortionOfBatches:
        """Portion `host` of `hosts`, from batch `number` on, where the source is at a position."""
        batches = self._batches(host, hosts, every=self._every)
        batches.go_to(number, position)
        return PortionOfBatches(batches, self._every)

    def here(self, **options: Any) -> Batches:
        """All of the batches, in one portion, read in this process."""
        return self._batches(0, 1, **options)

    def _batches(self, host: int, hosts: int, **options: Any) -> Batches:
        if self._begins_anywhere:
            return Batches(lambda start: iter(self._function(host, hosts, start)), **options)
        source = self._function(host, hosts)
        if not has_position(source) and iter(source) is source:
            source = _Again(lambda: self._function(host, hosts))
        return Batches(source, **options)


class _Again:
    """What is begun anew each time."""

    def __init__(self, make: Callable[[], Iterable[Any]]):
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


class PortionOfBatches:
    """One portion of each batch, one after the other."""

    def __init__(self, batches: Batches, every: int):
        self._batches, self._every = batches, every

    def at(self, number: int) -> Any | None:
        """The portion of batch `number`, which is the next; None: there is none."""
        if number % self._every == 0:
            self._batches.forget(number)
        try:
            return self._batches.at(number)
        except EndOfBatches:
            return None

    def position(self, number: int) -> Any | None:
        """Where the source is when batch `number` is the next, as JSON; None: it cannot tell."""
        return self._batches.position(number)
