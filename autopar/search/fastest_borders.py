"""Chooses where a pipeline's stages begin: more or less balanced, whichever makes the step faster under its schedule.

In:     a step that is cut, its work in seconds (`inter_op/weigh.py`), the stages' sizes, the schedule, the cluster.
Out:    the plan within the best borders that fit.
Method: for a few limits on the largest stage, the borders over which the fewest bytes cross (`inter_op/borders.py`), timed in
        the order in which the steps run, round by round, with the seconds of each pass of a stage and of each transfer. What
        uneven stages cost depends on that order: under 1F1B a short last stage is little worse than an even one. Where
        stacks of layers are split, only the largest limit holds: equal parts of a stack are one array for the user.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from autopar.cost.collectives import transfer_seconds
from autopar.errors import InfeasibleError, NoPlanFoundError, needed_bytes
from autopar.inter_op.borders import balanced_borders
from autopar.inter_op.chain import Chain
from autopar.inter_op.cut import CutStep
from autopar.mesh import Cluster
from autopar.search.pipeline import SlowerError
from autopar.streams.assemble import PipelinePlan, steps_in_order
from autopar.streams.schedules import Schedule, Step, num_chunks
from autopar.streams.schedules.schedule import clocks
from autopar.tuning import TUNING


def in_fastest_borders(
    cut: CutStep,
    sizes: Sequence[int],
    schedule: Schedule,
    cluster: Cluster,
    plan: Callable[[tuple[int, ...]], PipelinePlan],
) -> PipelinePlan:
    """Plan within the fastest borders; if that does not fit the memory, within the next: balance of time is none of bytes.

    Args:
        cut: The step.
        sizes: Number of devices of each stage, by the least of which the work is weighed.
        schedule: Orders the microbatches.
        cluster: The machine.
        plan: From the first segment of each stage to a plan.

    Raises:
        InfeasibleError: None fits, with the least bytes needed; a proof only if none could.
        SlowerError: As `plan`.
    """
    failures: list[InfeasibleError] = []
    for borders in borders_by_speed(cut, sizes, schedule, cluster):
        try:
            return plan(borders)
        except SlowerError:
            raise
        except InfeasibleError as error:
            failures.append(error)
    raise min(failures, key=lambda error: (not isinstance(error, NoPlanFoundError), needed_bytes(error)))


def borders_by_speed(cut: CutStep, sizes: Sequence[int], schedule: Schedule, cluster: Cluster) -> list[tuple[int, ...]]:
    """First segments of all stages, for each limit on the largest one, the best first.

    Stages are as balanced as need be: with a larger limit more of them are equal, and are planned once. Arguments as in
    `in_fastest_borders`.
    """
    chain, slacks = cut.chain, TUNING.stage_slacks[: 1 if cut.stacks.count > 1 else None]
    found = list(dict.fromkeys(balanced_borders(chain, len(sizes), slack, sizes) for slack in slacks))
    if len(found) == 1:
        return found
    order = steps_in_order(cut, len(sizes) // num_chunks(schedule), schedule)
    seconds = {borders: _seconds(chain, borders, sizes, order, cluster) for borders in found}
    best = found[0]
    for borders in found[1:]:
        if seconds[borders] < (1 - TUNING.balance_gain) * seconds[best]:
            best = borders
    return sorted(found, key=lambda borders: (borders != best, seconds[borders]))


def _seconds(
    chain: Chain, borders: tuple[int, ...], sizes: Sequence[int], order: Sequence[Sequence[Step]], cluster: Cluster
) -> float:
    """Seconds of all microbatches in this order; inf: it deadlocks, which `check_order` reports."""
    speed = np.array(sizes) / min(sizes)
    is_split = any(step.kind == "W" for steps in order for step in steps)
    link = cluster.inter if cluster.hosts > 1 else cluster.intra
    passes = [np.add.reduceat(chain.work_of_pass(n), borders) / speed for n in range(2 * chain.num_rounds)]

    def length(stage: int, step: Step) -> float:
        forward = step.kind == "F"
        return float(passes[2 * step.round + (not forward)][stage]) / (1 if forward else 1 + is_split)

    def sent(sender: int, receiver: int) -> float:
        each_way = float(chain.cut_bytes[borders[max(sender, receiver)]]) / len(passes)
        return transfer_seconds(each_way, sizes[sender], sizes[receiver], link)

    try:
        return clocks(order, length, sent)[0]
    except ValueError:
        return math.inf
