"""Inference: forward only, one microbatch after the other.

    stage 0  F0 F1 F2 F3 .
    stage 1  .  F0 F1 F2 F3

m + s - 1 clocks; for steps without a backward pass.
"""

from __future__ import annotations

from autopar.streams.schedules.schedule import Step


class Inference:
    """Forward only."""

    name = "inference"

    def order(self, num_stages: int, num_microbatches: int) -> list[list[Step]]:
        """The steps of each stage, the same for all."""
        return [[Step("F", k) for k in range(num_microbatches)] for _ in range(num_stages)]
