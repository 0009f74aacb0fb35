"""Chooses where a pipeline's stages begin: more or less balanced, whichever makes the step faster under its schedule.

In:     a step that is cut, its work in seconds (`inter_op/weigh.py`), the stages' sizes, the schedule, the cluster.
Out:    the first segment of each stage.
Method: for a few limits on the largest stage, the borders over which the fewest bytes cross (`inter_op/borders.py`), timed in
        the order of the schedule, with the seconds of each pass of a stage and of each transfer. What uneven stages cost
        depends on the schedule: under 1F1B a short last stage is little worse than an even one. Where stacks of layers are
        split, only the largest limit holds: equal parts of a stack are one array for the user.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autopar.cost.collectives import transfer_seconds
from autopar.inter_op.borders import balanced_borders
from autopar.inter_op.chain import Chain
from autopar.inter_op.cut import CutStep
from autopar.mesh import Cluster
from autopar.streams.schedules import Schedule, Step, num_chunks
from autopar.streams.schedules.schedule import clocks
from autopar.tuning import TUNING


def fastest_borders(cut: CutStep, sizes: Sequence[int], schedule: Schedule, cluster: Cluster) -> tuple[int, ...]:
    """First segment of each stage.

    Stages are as balanced as need be: with a larger limit more of them are equal, and are planned once.

    `sizes`: number of devices of each stage, by the least of which the work is weighed.
    """
    chain, slacks = cut.chain, TUNING.stage_slacks[: 1 if cut.stacks.count > 1 else None]
    found = dict.fromkeys(balanced_borders(chain, len(sizes), slack, sizes) for slack in slacks)
    best, *others = found
    if others:
        order = schedule.order(len(sizes) // num_chunks(schedule), cut.split.count)
        least = _seconds(chain, best, sizes, order, cluster)
        for borders in others:
            seconds = _seconds(chain, borders, sizes, order, cluster)
            if seconds < (1 - TUNING.balance_gain) * least:
                best, least = borders, seconds
    return best


def _seconds(
    chain: Chain, borders: tuple[int, ...], sizes: Sequence[int], order: Sequence[Sequence[Step]], cluster: Cluster
) -> float:
    """Seconds of all microbatches in this order; inf: it deadlocks, which `check_order` reports."""
    speed = np.array(sizes) / min(sizes)
    is_split = any(step.kind == "W" for steps in order for step in steps)
    link = cluster.inter if cluster.hosts > 1 else cluster.intra
    forward, backward = (np.add.reduceat(chain.work_of_pass(way), borders) / speed for way in (False, True))

    def length(stage: int, step: Step) -> float:
        return float(forward[stage] if step.kind == "F" else backward[stage] / (1 + is_split))

    def sent(sender: int, receiver: int) -> float:
        each_way = float(chain.cut_bytes[borders[max(sender, receiver)]]) / 2
        return transfer_seconds(each_way, sizes[sender], sizes[receiver], link)

    try:
        return clocks(order, length, sent)[0]
    except ValueError:
        return math.inf
