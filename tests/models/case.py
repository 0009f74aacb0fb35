"""One training step to be judged: the step, its state, three batches, and how closely the results must agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """A training step as a user writes it.

    Attributes:
        name: Of the model.
        step: `(state, batch) -> (state, metrics)`.
        state: Everything that comes back: parameters, optimizer state, statistics, counters, keys.
        batches: Three; every leaf's leading dim is the batch.
        tolerance: Largest difference from plain `jax.jit`, relative to the scale of each leaf.
        why: Why the tolerance is more than 1e-5.
        fixed_batch: Whether the step says how many samples its batch has.
        refused: What of it cannot be worked through in microbatches exactly; "" if all can.
    """

    name: str
    step: Callable[[Any, Any], tuple[Any, Any]]
    state: Any
    batches: tuple[Any, ...]
    tolerance: float = 1e-5
    why: str = ""
    fixed_batch: bool = False
    refused: str = ""
