"""Interleaved 1F1B: each mesh holds several chunks of the model, so that a microbatch comes round sooner.

    mesh 0  F0 F1 f0 f1 .  .  b0 B0 ...             2 meshes with 2 chunks each; small letters: the second chunk
    mesh 1  .  F0 F1 f0 b0 f1 B0 b1 ...

Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC 2021, sec. 2.2.
With v chunks the bubble is v times shorter than 1F1B's, for v times as many messages and a few more microbatches in
flight. Microbatches go round in groups of as many as there are meshes.
"""

from __future__ import annotations

from autopar.plan.schedules.schedule import Step


class Interleaved:
    """One forward, one backward, over `num_chunks` chunks per mesh."""

    name = "interleaved"

    def __init__(self, num_chunks: int = 2):
        self.num_chunks = num_chunks

    def order(self, num_stages: int, num_microbatches: int) -> list[list[Step]]:
        """`num_stages` counts meshes here; each gets `num_chunks` stages."""
        forward, backward = [], []
        for first in range(0, num_microbatches, num_stages):
            group = range(first, min(first + num_stages, num_microbatches))
            for chunk in range(self.num_chunks):
                forward += [Step("F", k, chunk) for k in group]
                backward += [Step("B", k, self.num_chunks - 1 - chunk) for k in group]
        total = len(forward)
        found = []
        for mesh in range(num_stages):
            last_group = min(num_stages, num_microbatches)
            ahead = min(total, (num_stages - mesh - 1) * 2 + (self.num_chunks - 1) * last_group)
            steps = forward[:ahead]
            for k in range(total):
                if ahead + k < total:
                    steps.append(forward[ahead + k])
                steps.append(backward[k])
            found.append(steps)
        return found
