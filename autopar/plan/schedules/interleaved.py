"""Interleaved 1F1B: each mesh holds several chunks of the model, so that a microbatch comes round sooner.

    mesh 0  F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 .  b2 .  b3 B2 B3       4 microbatches, 2 meshes with 2 chunks each;
    mesh 1  .  F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3 .        small letters: the second chunk

Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", SC 2021, sec. 2.2.
With v chunks the bubble is v times shorter than 1F1B's, for v times as many messages and a few more microbatches in
flight. Microbatches go round in groups of as many as there are meshes.
"""

from __future__ import annotations

from autopar.plan.schedules.schedule import Step, clocks


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
        if num_microbatches % num_stages == 0:
            return found
        # The last group is not a whole one: meshes may wait for each other in a circle, and they may wait too long.
        others = [
            _taking_turns(forward, backward, num_stages, self.num_chunks, spare)
            for spare in range(num_stages * self.num_chunks)
        ]
        return min((o for o in (found, *others) if not _is_circle(o)), key=lambda o: clocks(o)[0])


def _is_circle(order: list[list[Step]]) -> bool:
    try:
        clocks(order)
    except ValueError:
        return True
    return False


def _taking_turns(
    forward: list[Step], backward: list[Step], num_meshes: int, num_chunks: int, spare: int
) -> list[list[Step]]:
    """The same on a clock of unit tasks: each mesh does its next backward as soon as it can, else its next forward, with
    at most `spare` more in flight than the schedule of whole groups has."""
    done: dict[tuple[int, str, int], int] = {}
    orders: list[list[Step]] = [[] for _ in range(num_meshes)]
    at = [{"F": 0, "B": 0} for _ in range(num_meshes)]
    last = num_meshes * num_chunks - 1
    clock = 0

    def ready(mesh: int, step: Step) -> bool:
        stage = step.chunk * num_meshes + mesh
        if step.kind == "F":
            needs = [(stage - 1, "F")] if stage else []
        else:
            needs = [(stage, "F"), *([(stage + 1, "B")] if stage < last else [])]
        return all(done.get((s, kind, step.microbatch), clock + 1) <= clock for s, kind in needs)

    while any(at[mesh]["B"] < len(backward) for mesh in range(num_meshes)):
        began = []
        for mesh in range(num_meshes):
            ahead = (num_meshes - mesh - 1) * 2 + (num_chunks - 1) * num_meshes + 1 + spare
            number = at[mesh]
            if number["B"] < len(backward) and ready(mesh, backward[number["B"]]):
                began.append((mesh, backward[number["B"]]))
            elif number["F"] < len(forward) and number["F"] - number["B"] < ahead and ready(mesh, forward[number["F"]]):
                began.append((mesh, forward[number["F"]]))
        for mesh, step in began:
            done[step.chunk * num_meshes + mesh, step.kind, step.microbatch] = clock + 1
            orders[mesh].append(step)
            at[mesh][step.kind] += 1
        clock += 1
    return orders
