"""The schedules that autopar knows, each with its timetable.

In:     numbers of stages (of meshes, if these hold several chunks each) and of microbatches.
Out:    the order of each stage's steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from autopar.inter_op.tasks import BackwardSplit
from autopar.streams.schedules.schedule import Step


class GPipe:
    """GPipe: all microbatches forward, then all backward.

        stage 0  F0 F1 F2 F3 .  .  B0 B1 B2 B3          4 microbatches, 2 stages
        stage 1  .  F0 F1 F2 F3 B0 B1 B2 B3 .

    Huang et al., "GPipe: efficient training of giant neural networks using pipeline parallelism", NeurIPS 2019.
    2 (m + s - 1) clocks of unit tasks; every stage holds the residuals of all m microbatches. Here the backwards come in
    the order of the forwards, so that sums over microbatches are the same under every schedule.
    """

    name = "gpipe"

    def order(self, num_stages: int, num_microbatches: int) -> list[list[Step]]:
        """The steps of each stage, the same for all."""
        forward = [Step("F", k) for k in range(num_microbatches)]
        backward = [Step("B", k) for k in range(num_microbatches)]
        return [[*forward, *backward] for _ in range(num_stages)]


class OneFOneB:
    """1F1B: after a warm-up of forwards, each stage alternates one forward and one backward.

        stage 0  F0 F1 .  B0 F2 B1 F3 B2 .  B3          4 microbatches, 2 stages
        stage 1  .  F0 B0 F1 B1 F2 B2 F3 B3 .

    Narayanan et al., "PipeDream", SOSP 2019, with a flush: "Memory-efficient pipeline-parallel DNN training", ICML 2021.
    2 (m + s - 1) clocks of unit tasks, as GPipe; but stage i of s holds the residuals of at most s - i microbatches.
    """

    name = "1f1b"

    def order(self, num_stages: int, num_microbatches: int) -> list[list[Step]]:
        """Stage i of s does s - i - 1 forwards before it alternates."""
        forward = [Step("F", k) for k in range(num_microbatches)]
        backward = [Step("B", k) for k in range(num_microbatches)]
        return [_alternating(forward, backward, num_stages - stage - 1) for stage in range(num_stages)]


def _alternating(forward: Sequence[Step], backward: Sequence[Step], ahead: int) -> list[Step]:
    """`ahead` forward steps, then one forward and one backward in turn, as long as there are any."""
    turns = itertools.zip_longest(forward[ahead:], backward)
    return [*forward[:ahead], *(step for turn in turns for step in turn if step is not None)]


class Interleaved:
    """Interleaved 1F1B: each mesh holds several chunks of the model, which shortens the bubble.

        mesh 0  F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 .  b2 .  b3 B2 B3       4 microbatches, 2 meshes with 2 chunks each;
        mesh 1  .  F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3 .        small letters: the second chunk

    Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC 2021, sec. 2.2.
    With v chunks the bubble is v times shorter than 1F1B's, for v times as many messages and a few more microbatches in
    flight. Microbatches pass through the chunks in groups of as many as there are meshes, or a few more if that is uneven.
    """

    def __init__(self, num_chunks: int = 2):
        self.num_chunks = num_chunks
        self.name = "interleaved" if num_chunks == 2 else f"interleaved-{num_chunks}"

    def order(self, num_stages: int, num_microbatches: int) -> list[list[Step]]:
        """`num_stages` counts meshes here; each gets `num_chunks` stages."""
        forward, backward = [], []
        groups = _groups(num_stages, num_microbatches)
        for group in groups:
            for chunk in range(self.num_chunks):
                forward += [Step("F", k, chunk) for k in group]
                backward += [Step("B", k, self.num_chunks - 1 - chunk) for k in group]
        further = (self.num_chunks - 1) * len(groups[0])
        return [_alternating(forward, backward, 2 * (num_stages - mesh - 1) + further) for mesh in range(num_stages)]


def _groups(num_meshes: int, num_microbatches: int) -> list[range]:
    """Microbatches in groups of as many as there are meshes, or a few more: the first groups take the remainder."""
    count = max(1, num_microbatches // num_meshes)
    sizes = [num_microbatches // count + (k < num_microbatches % count) for k in range(count)]
    firsts = [sum(sizes[:k]) for k in range(count)]
    return [range(first, first + size) for first, size in zip(firsts, sizes, strict=True)]


class ZeroBubbleH1:
    """ZB-H1: splits the backward in two halves; no stage waits for the second, which fills the bubble.

        stage 0  F0 F1 .  B0 W0 F2 B1 W1 F3 B2 W2 B3 W3             B: cotangents of the stage's inputs; W: of its weights
        stage 1  .  F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3             4 microbatches, 2 stages

    Qi et al., "Zero bubble pipeline parallelism", ICLR 2024, sec. 2.3. 1F1B, in which stage i does the weight half of a
    microbatch i microbatches later, so that every stage has as many in flight as the first has under 1F1B. With F, B and W of
    equal length the bubble is a third of 1F1B's: (s - 1) (F + B - W) instead of (s - 1) (F + B + W).

    Backward loops over layers are split in two for that, and keep residuals until their second half has run; `whole_loops`
    does both halves of a loop in B.
    """

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


class Inference:
    """Inference: forward only, one microbatch after the other.

        stage 0  F0 F1 F2 F3 .
        stage 1  .  F0 F1 F2 F3

    m + s - 1 clocks; for steps without a backward pass.
    """

    name = "inference"

    def order(self, num_stages: int, num_microbatches: int) -> list[list[Step]]:
        """The steps of each stage, the same for all."""
        return [[Step("F", k) for k in range(num_microbatches)] for _ in range(num_stages)]
