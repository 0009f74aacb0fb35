"""What people ask about a plan beside its seconds: how well the devices are used, how fast it learns, what it moves and costs.

In:     (types only; `search/figures.py` counts them.)
Out:    `Figures`, which stand in a plan's cost.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figures:
    """What one step does, counted.

    Attributes:
        model_seconds: Its multiplications on all devices at once, each at the datasheet's peak for its operands, and
            nothing else: those that the step would need had it all memory, recomputation left out.
        hardware_seconds: The same with what is computed again, because the step says so (`jax.checkpoint`) or the plan.
        amount: What one step learns from: so many of `unit`; 0: nothing was recognised as a batch.
        unit: `"tokens"` or `"samples"`.
        link_bytes: By level of the machine, what one device sends over it in a step, on average: (level, bytes), the
            nearest first.
        watts: Of all devices; None: a device does not state it.
        price_per_hour: Of all devices; None: the cluster does not state it.
    """

    model_seconds: float = 0.0
    hardware_seconds: float = 0.0
    amount: int = 0
    unit: str = "samples"
    link_bytes: tuple[tuple[str, int], ...] = ()
    watts: float | None = None
    price_per_hour: float | None = None
