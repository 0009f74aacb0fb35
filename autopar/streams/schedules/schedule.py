"""The interface of schedules, and what follows from their order.

In:     numbers of stages and microbatches.
Out:    for each mesh the order of its `Step`s: forward (F), backward (B) and, where the backward is split, its
        weight half (W) of each microbatch.
Method: a schedule only orders; when a step can start follows from what it receives. `clocks` times an order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from autopar.inter_op.stage import StepKind
from autopar.inter_op.tasks import BackwardSplit


@dataclass(frozen=True, slots=True)
class Step:
    """One task of one microbatch; `chunk`: which of the mesh's stages; `round`: how many passes over all microbatches
    precede it."""

    kind: StepKind
    microbatch: int
    chunk: int = 0
    round: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}"


class Schedule(Protocol):
    """An order of steps for each mesh. A user's own schedule is a class with these two members."""

    name: str

    def order(self, num_stages: int, num_microbatches: int) -> list[list[Step]]:
        """For each mesh, its steps in order: each kind once for every microbatch and chunk."""
        ...


def num_chunks(schedule: Schedule) -> int:
    """How many stages one mesh holds: the schedule's `num_chunks`, 1 if it has no such attribute."""
    return getattr(schedule, "num_chunks", 1)


def splits_backward(schedule: Schedule) -> BackwardSplit:
    """Where backward steps are split into B and W: the schedule's `splits_backward`, True meaning "everywhere".

    "nowhere" if it has no such attribute.
    """
    given: BackwardSplit | bool = getattr(schedule, "splits_backward", False)
    if isinstance(given, bool):
        return "everywhere" if given else "nowhere"
    return given


def in_rounds(order: Sequence[Sequence[Step]], count: int, forward_first_in: Collection[int]) -> list[list[Step]]:
    """Repeat an order `count` times, in the rounds `forward_first_in` with all forward steps first."""
    rounds = [forward_first(order) if number in forward_first_in else order for number in range(count)]
    return [
        [replace(step, round=number) for number, own in enumerate(rounds) for step in own[mesh]]
        for mesh in range(len(order))
    ]


def forward_first(order: Sequence[Sequence[Step]]) -> list[list[Step]]:
    """The order with every mesh's forward steps before its other steps."""
    return [sorted(steps, key=lambda step: step.kind != "F") for steps in order]


def in_flight(order: Sequence[Sequence[Step]]) -> list[int]:
    """For each stage, the most microbatches in flight: past their forward step and before their last one."""
    ends = "W" if any(step.kind == "W" for steps in order for step in steps) else "B"
    most = [0] * (len(order) * (1 + max((step.chunk for steps in order for step in steps), default=0)))
    for mesh, steps in enumerate(order):
        now = [0] * len(most)
        for step in steps:
            stage = step.chunk * len(order) + mesh
            now[stage] += (step.kind == "F") - (step.kind == ends)
            most[stage] = max(most[stage], now[stage])
    return most


def clocks(
    order: Sequence[Sequence[Step]],
    length: Callable[[int, Step], float] = lambda stage, step: 1,
    sent: Callable[[int, int], float] = lambda sender, receiver: 0,
) -> tuple[float, list[list[tuple[float, Step]]]]:
    """Time an order: when each step starts, and the length of all.

    Args:
        order: For each mesh, its steps in order.
        length: From a stage and one of its steps to the length of that; by default every step takes one clock.
        sent: From two stages to the time that the first takes to send to the second.

    Returns:
        The length, and for each mesh its (start, step).

    Raises:
        ValueError: The stages deadlock.
    """
    num_meshes = len(order)
    num_stages = num_meshes * (1 + max((step.chunk for steps in order for step in steps), default=0))
    done: dict[tuple[int, str, int, int], float] = {}
    free, at = [0.0] * num_meshes, [0] * num_meshes
    found: list[list[tuple[float, Step]]] = [[] for _ in order]
    while any(k < len(steps) for k, steps in zip(at, order, strict=True)):
        moved = False
        for mesh, steps in enumerate(order):
            if at[mesh] == len(steps):
                continue
            step = steps[at[mesh]]
            stage = step.chunk * num_meshes + mesh
            needs = _needs(stage, step, num_stages)
            if all(need in done for need in needs):
                start = max([free[mesh], *(done[need] + (need[0] != stage and sent(need[0], stage)) for need in needs)])
                done[stage, step.kind, step.microbatch, step.round] = free[mesh] = start + length(stage, step)
                found[mesh].append((start, step))
                at[mesh] += 1
                moved = True
        if not moved:
            waiting = [
                f"mesh {s}: {steps[k]}" for s, (k, steps) in enumerate(zip(at, order, strict=True)) if k < len(steps)
            ]
            raise ValueError(f"the schedule cannot go on: {'; '.join(waiting)}.")
    return max(free), found


def _needs(stage: int, step: Step, num_stages: int) -> list[tuple[int, str, int, int]]:
    which = step.microbatch, step.round
    match step.kind:
        case "F":
            return [(stage - 1, "F", *which)] if stage else []
        case "B":
            return [(stage, "F", *which), *([(stage + 1, "B", *which)] if stage + 1 < num_stages else [])]
        case _:
            return [(stage, "B", *which)]
