"""Interleaved 1F1B: each mesh holds several chunks of the model, which shortens the bubble.

    mesh 0  F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 .  b2 .  b3 B2 B3       4 microbatches, 2 meshes with 2 chunks each;
    mesh 1  .  F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3 .        small letters: the second chunk

Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC 2021, sec. 2.2.
With v chunks the bubble is v times shorter than 1F1B's, for v times as many messages and a few more microbatches in
flight. Microbatches pass through the chunks in groups of as many as there are meshes, or a few more if that is uneven.
"""

from __future__ import annotations

from autopar.streams.schedules.schedule import Step


class Interleaved:
    """One forward, one backward, over `num_chunks` chunks per mesh."""

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
        total = len(forward)
        found = []
        for mesh in range(num_stages):
            ahead = min(total, (num_stages - mesh - 1) * 2 + (self.num_chunks - 1) * len(groups[0]))
            steps = forward[:ahead]
            for k in range(total):
                if ahead + k < total:
                    steps.append(forward[ahead + k])
                steps.append(backward[k])
            found.append(steps)
        return found


def _groups(num_meshes: int, num_microbatches: int) -> list[range]:
    """Microbatches in groups of as many as there are meshes, or a few more: the first groups take the remainder."""
    count = max(1, num_microbatches // num_meshes)
    sizes = [num_microbatches // count + (k < num_microbatches % count) for k in range(count)]
    firsts = [sum(sizes[:k]) for k in range(count)]
    return [range(first, first + size) for first, size in zip(firsts, sizes, strict=True)]
