"""ZB-H1: splits the backward in two halves; no stage waits for the second, which fills the bubble.

    stage 0  F0 F1 .  B0 W0 F2 B1 W1 F3 B2 W2 B3 W3             B: cotangents of the stage's inputs; W: of its weights
    stage 1  .  F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3             4 microbatches, 2 stages

Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, sec. 2.3. 1F1B, in which stage i does the weight half of a
microbatch i microbatches later, so that every stage has as many in flight as the first has under 1F1B. With F, B and W of
equal length the bubble is a third of 1F1B's: (s - 1) (F + B - W) instead of (s - 1) (F + B + W).

Backward loops over layers are split in two for that, and keep residuals until their second half has run; `whole_loops`
does both halves of a loop in B.
"""

from __future__ import annotations

from autopar.inter_op.tasks import BackwardSplit
from autopar.streams.schedules.one_f_one_b import OneFOneB
from autopar.streams.schedules.schedule import Step


class ZeroBubbleH1:
    """1F1B with W delayed by as many microbatches as the stage's number."""

    def __init__(self, whole_loops: bool = False):
        self.name = "zb-h1-whole" if whole_loops else "zb-h1"
        self.splits_backward: BackwardSplit = "outside loops" if whole_loops else "everywhere"

    def order(self, num_stages: int, num_microbatches: int) -> list[list[Step]]:
        """1F1B's steps, with the weight half of microbatch k - i after backward k, at stage i."""
        found = []
        for stage, steps in enumerate(OneFOneB().order(num_stages, num_microbatches)):
            own = []
            for step in steps:
                own.append(step)
                if step.kind == "B" and step.microbatch >= stage:
                    own.append(Step("W", step.microbatch - stage))
            own += [Step("W", k) for k in range(max(0, num_microbatches - stage), num_microbatches)]
            found.append(own)
        return found
