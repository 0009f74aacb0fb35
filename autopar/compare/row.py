"""One cluster and method of a comparison, and what follows from its plan.

In:     a plan, what its step learns from, what the devices cost.
Out:    rates, what is left of the memory, price and energy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.report.plan import Plan


@dataclass(frozen=True, slots=True)
class Row:
    """One cluster and method.

    Attributes:
        cluster: In words.
        method: In words.
        plan: None: there is none.
        problem: Why there is none, one line.
        price_per_hour: Of all devices; None: not stated.
        watts: Of all devices; None: not stated.
    """

    cluster: str
    method: str
    plan: Plan | None
    problem: str = ""
    price_per_hour: float | None = None
    watts: float | None = None

    @property
    def step_seconds(self) -> float:
        """Of one step; inf: there is no plan."""
        return math.inf if self.plan is None else self.plan.cost.step_seconds

    @property
    def mfu(self) -> float:
        """Share of the devices' peak that the step's own multiplications take, 0 to 1."""
        return 0.0 if self.plan is None else self.plan.cost.mfu

    @property
    def amount(self) -> int:
        """What one step learns from: so many of `unit`."""
        return 0 if self.plan is None else self.plan.cost.figures.amount

    @property
    def unit(self) -> str:
        """`"tokens"` or `"samples"`."""
        return "samples" if self.plan is None else self.plan.cost.figures.unit

    @property
    def exposed_seconds(self) -> float:
        """Part of the step in which devices wait for collectives."""
        return 0.0 if self.plan is None else self.plan.cost.exposed_communication_seconds

    @property
    def rate(self) -> float:
        """Units per second."""
        return 0.0 if self.plan is None else self.plan.cost.rate

    @property
    def left_bytes(self) -> float:
        """Of the budget, on the fullest device."""
        return 0.0 if self.plan is None else self.plan.budget_bytes - max(self.plan.cost.peak_bytes)

    @property
    def price_per_million(self) -> float | None:
        """Of a million units."""
        return self._per_million(self.price_per_hour, 3600)

    @property
    def kwh_per_million(self) -> float | None:
        """Energy for a million units."""
        return self._per_million(self.watts, 3.6e6)

    def _per_million(self, per_hour: float | None, seconds: float) -> float | None:
        return None if per_hour is None or not self.rate else per_hour / seconds * 1e6 / self.rate
