"""Reads one portion of each batch, by the user's function of a host's number and the number of hosts.

In:     the user's `batches(host, hosts)`, or `batches(host, hosts, start)`.
Out:    `PortionReader`, which is sent to the workers and opens portions there; `PortionOfBatches`, an open portion.
Method: what the function returns is a source like any other (`batches.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from autopar.fit.batches import Batches, EndOfBatches
from autopar.fit.positions import has_position

ByHost = Callable[..., Iterable[Any]]
"""A function of `(host, hosts)`, or of `(host, hosts, start)`, to portion `host` of each batch, from batch `start` on."""


def is_by_host(source: Any) -> bool:
    """Whether a source is such a function, by the names of its parameters."""
    try:
        names = list(inspect.signature(source).parameters) if callable(source) else []
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    return names[:2] == ["host", "hosts"] and names[2:] in ([], ["start"])


class PortionReader:
    """Opens portions of batches; it is sent to the workers."""

    def __init__(self, function: ByHost, every: int):
        """Opens nothing yet; `every`: positions of the source are recorded at multiples of it."""
        self._function, self._every = function, every
        self._begins_anywhere = "start" in inspect.signature(function).parameters

    def open(self, host: int, hosts: int, number: int, position: Any | None = None) -> PortionOfBatches:
        """Portion `host` of `hosts`, from batch `number` on; `position`: of the source there, if it has one."""
        batches = self._batches(host, hosts, every=self._every)
        batches.go_to(number, position)
        return PortionOfBatches(batches, self._every)

    def here(self, **options: Any) -> Batches:
        """The whole batches, as one portion, read in this process."""
        return self._batches(0, 1, **options)

    def _batches(self, host: int, hosts: int, **options: Any) -> Batches:
        if self._begins_anywhere:
            return Batches(lambda start: iter(self._function(host, hosts, start)), **options)
        source = self._function(host, hosts)
        if not has_position(source) and iter(source) is source:
            source = _Again(lambda: self._function(host, hosts))
        return Batches(source, **options)


class _Again:
    """An iterable that calls the function anew for each iteration."""

    def __init__(self, make: Callable[[], Iterable[Any]]):
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


class PortionOfBatches:
    """One portion of each batch, in order."""

    def __init__(self, batches: Batches, every: int):
        self._batches, self._every = batches, every

    def at(self, number: int) -> Any | None:
        """The portion of batch `number`, which is the next; None: the batches have ended."""
        if number % self._every == 0:
            self._batches.forget(number)
        try:
            return self._batches.at(number)
        except EndOfBatches:
            return None

    def position(self, number: int) -> Any | None:
        """The position of the source before batch `number`, as JSON; None: it has none."""
        return self._batches.position(number)
