"""1F1B: after a warm-up of forwards, each stage alternates one forward and one backward.

    stage 0  F0 F1 .  B0 F2 B1 F3 B2 .  B3          4 microbatches, 2 stages
    stage 1  .  F0 B0 F1 B1 F2 B2 F3 B3 .

Narayanan et al., "PipeDream", SOSP 2019, with a flush: "Memory-efficient pipeline-parallel DNN training", ICML 2021.
2 (m + s - 1) clocks of unit tasks, as GPipe; but stage i of s holds the residuals of at most s - i microbatches.
"""

from __future__ import annotations

from autopar.streams.schedules.schedule import Step


class OneFOneB:
    """One forward, one backward."""

    name = "1f1b"

    def order(self, num_stages: int, num_microbatches: int) -> list[list[Step]]:
        """Stage i of s does s - i - 1 forwards before it alternates."""
        found = []
        for stage in range(num_stages):
            ahead = min(num_stages - stage - 1, num_microbatches)
            steps = [Step("F", k) for k in range(ahead)]
            for k in range(num_microbatches):
                if ahead + k < num_microbatches:
                    steps.append(Step("F", ahead + k))
                steps.append(Step("B", k))
            found.append(steps)
        return found
