"""Chooses where a pipeline's stages begin: more or less balanced, whichever makes the step faster under its schedule.

In:     a step that is cut, its work in seconds (`inter_op/weigh.py`), the stages' sizes, the schedule, the cluster.
Out:    the plan within the best borders that fit; where others are nearly as good and quickly planned, the fastest plan.
Method: for a few limits on the largest stage, the borders over which the fewest bytes cross (`inter_op/borders.py`), timed in
        the order in which the steps run, round by round, with the seconds of each pass of a stage and of each transfer. What
        uneven stages cost depends on that order: under 1F1B a short last stage is little worse than an even one. What is
        sent within stages shows only once they are sharded: of small steps the next borders are planned, too, and the
        simulator decides. Where stacks of layers are split, only the largest limit holds: equal parts of a stack are one
        array for the user.
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
from autopar.intra_op.problem import planning_seconds
from autopar.mesh import Cluster
from autopar.search.pipeline import SlowerError
from autopar.search.solve_stages import Terms
from autopar.streams.assemble import PipelinePlan, steps_in_order
from autopar.streams.schedules import Schedule, Step, num_chunks
from autopar.streams.schedules.schedule import clocks
from autopar.tuning import TUNING


def in_fastest_borders(
    cut: CutStep,
    sizes: Sequence[int],
    schedule: Schedule,
    terms: Terms,
    plan: Callable[[tuple[int, ...]], PipelinePlan],
    beat: float = math.inf,
) -> PipelinePlan:
    """Plan within the fastest borders; if that does not fit the memory, within the next: balance of time is none of bytes.

    So, too, where that takes next to no time, within borders that are nearly as fast: the fastest plan is taken.

    Args:
        cut: The step.
        sizes: Number of devices of each stage, by the least of which the work is weighed.
        schedule: Orders the microbatches.
        terms: The machine, and the objective.
        plan: From the first segment of each stage to a plan.
        beat: Objective of the best step known: where the first plan is far from it, no others are made.

    Raises:
        InfeasibleError: None fits, with the least bytes needed; a proof only if none could.
        SlowerError: As `plan`.
    """
    failures: list[InfeasibleError] = []
    planned: list[PipelinePlan] = []
    goal = terms.options.goal
    ranked = borders_by_speed(cut, sizes, schedule, terms.cluster)
    for borders, seconds in ranked.items():
        if planned:
            is_near = seconds <= (1 + TUNING.borders_doubt) * next(iter(ranked.values()))
            is_over = terms.options.is_over or not _is_quick(planned[0])
            if is_over or not is_near or planned[0].seconds_for(goal) > (1 + TUNING.borders_doubt) * beat:
                continue
        try:
            planned.append(plan(borders))
        except InfeasibleError as error:
            if isinstance(error, SlowerError) and not planned:
                raise
            failures.append(error.kept())
    if not planned:
        raise min(failures, key=lambda error: (not isinstance(error, NoPlanFoundError), needed_bytes(error)))
    return min(planned, key=lambda each: each.seconds_for(goal))


def _is_quick(planned: PipelinePlan) -> bool:
    """Whether another plan of the same step takes next to no time."""
    return sum(planning_seconds(stage.sharded.problem) for stage in planned.stages) <= TUNING.borders_seconds


def borders_by_speed(
    cut: CutStep, sizes: Sequence[int], schedule: Schedule, cluster: Cluster
) -> dict[tuple[int, ...], float]:
    """First segments of all stages, for each limit on the largest one, and the seconds of a step so cut; the best first.

    Stages are as balanced as need be: with a larger limit more of them are equal, and are planned once. Other arguments as
    in `in_fastest_borders`. `cluster`: the machine.
    """
    chain, slacks = cut.chain, TUNING.stage_slacks[: 1 if cut.stacks.count > 1 else None]
    found = list(dict.fromkeys(balanced_borders(chain, len(sizes), slack, sizes) for slack in slacks))
    if len(found) == 1:
        return {found[0]: 0.0}
    order = steps_in_order(cut, len(sizes) // num_chunks(schedule), schedule)
    seconds = {borders: _seconds(chain, borders, sizes, order, cluster) for borders in found}
    best = found[0]
    for borders in found[1:]:
        if seconds[borders] < (1 - TUNING.balance_gain) * seconds[best]:
            best = borders
    return {borders: seconds[borders] for borders in sorted(found, key=lambda each: (each != best, seconds[each]))}


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
