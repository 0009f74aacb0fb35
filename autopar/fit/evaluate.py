"""Runs the eval step over its batches, and averages its metrics.

In:     an eval step, its batches, a state.
Out:    means of its scalars over the batches, by name.
Method: each batch is weighted by its number of rows, or by the sum of its mask, so that means over batches become the mean
        over all rows. One step at a time is in flight.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from autopar.errors import AutoparError
from autopar.fit.batches import Batches, EndOfBatches, Source
from autopar.fit.hosts import batches as by_host
from autopar.fit.portions import ByHost, is_by_host
from autopar.fit.remainder import Remainder, weight_of
from autopar.fit.state import scalars_of
from autopar.follow import Following


class Evaluation:
    """How the state is evaluated, and after which steps."""

    def __init__(self, step: Callable[..., Any], batches: Source | ByHost, every: int | None, remainder: Remainder):
        """Raises `AutoparError` if the batches can be iterated over only once."""
        if not callable(batches) and iter(batches) is batches:
            raise AutoparError(
                "eval batches are needed more than once.",
                given=f"fit(eval_batches={type(batches).__name__})",
                wrong="an iterator can be gone through only once.",
                do="pass a list, a dataset that can be iterated over again, or a function from a number to an iterator.",
            )
        self._step, self._source, self._every, self._remainder = step, batches, every, remainder

    def is_due(self, number: int) -> bool:
        """Whether to evaluate the state after so many steps; there is one evaluation at the end in any case."""
        return self._every is not None and number > 0 and number % self._every == 0

    def follow(self, step: Any) -> None:
        """Plan an eval step that follows the train step anew, behind the new train step."""
        if isinstance(self._step, Following):
            self._step = self._step.behind(step)

    def measure(self, state: Any) -> dict[str, float]:
        """The mean of each metric over all eval batches, by name."""
        sums: dict[str, float] = {}
        total = 0.0
        for batch in self._batches(state):
            weight = weight_of(batch)
            total += weight
            for name, value in scalars_of(self._step(state, batch)).items():
                sums[name] = sums.get(name, 0.0) + weight * value
        return {name: value / total for name, value in sums.items()}

    def _batches(self, state: Any) -> Iterator[Any]:
        if is_by_host(self._source):
            yield from by_host(self._source, self._step, state, remainder=self._remainder)  # type: ignore[arg-type]
            return
        source = Batches(self._source, remainder=self._remainder)  # type: ignore[arg-type]
        with contextlib.suppress(EndOfBatches):
            for number in itertools.count():
                yield source.at(number)
