"""GPipe: all microbatches forward, then all backward.

    stage 0  F0 F1 F2 F3 .  .  B0 B1 B2 B3          4 microbatches, 2 stages
    stage 1  .  F0 F1 F2 F3 B0 B1 B2 B3 .

Huang et al., "GPipe: efficient training of giant neural networks using pipeline parallelism", NeurIPS 2019.
2 (m + s - 1) clocks of unit tasks; every stage holds the residuals of all m microbatches. Here the backwards come in
the order of the forwards, so that sums over microbatches are the same under every schedule.
"""

from __future__ import annotations

from autopar.streams.schedules.schedule import Step


class GPipe:
    """All forward, then all backward."""

    name = "gpipe"

    def order(self, num_stages: int, num_microbatches: int) -> list[list[Step]]:
        """The steps of each stage, the same for all."""
        forward = [Step("F", k) for k in range(num_microbatches)]
        backward = [Step("B", k) for k in range(num_microbatches)]
        return [[*forward, *backward] for _ in range(num_stages)]
