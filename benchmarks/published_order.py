"""Compares the predicted and the published order of plans of one model.

In:     runs, each with its prediction.
Out:    Kendall's tau within groups of plans, the pairs in the wrong order, and the tau that a repetition of the runs would
        reach.
Method: plans of the same model, devices, batch and framework are a group. A plan that ran several times counts once, by its
        median; the spread of its times says how much of an order is chance.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from published_runs import Run
from published_steps import Prediction

Row = tuple[Run, Prediction]
DRAWS = 500
"""Of made-up repetitions, to see what repeating the same plans would score."""


@dataclass(frozen=True)
class Plan:
    """One of a group: what it sets, and its median seconds."""

    settings: tuple[tuple[str, Any], ...]
    published: float
    predicted: float
    times: tuple[float, ...]


@dataclass(frozen=True)
class Pair:
    """Two plans of a group, the one that was published faster first.

    Attributes:
        published: How much longer the second took: 0.1 is a tenth.
        predicted: The same as predicted; less than 0 where the order is wrong.
        differs: Which settings are not the same.
    """

    group: str
    faster: Plan
    slower: Plan
    published: float
    predicted: float
    differs: str


Group = tuple[str, int, tuple[Plan, ...]]
"""Model, devices, and the plans."""


def contradicted(rows: Sequence[Row]) -> list[Row]:
    """Timed runs that other rows contradict: the same plan was published several times, also with other batches.

    A step's time grows as its batch, but for the pipeline's bubble. A run is contradicted whose time per sample is further
    from the median of three or more than twice what any repetition of a run was from another.
    """
    alike: dict[Run, list[tuple[float, Row]]] = {}
    for run, predicted in rows:
        if run.seconds is not None:
            plan = replace(run, line=0, batch=0, seconds=None, memory_gib=None)
            alike.setdefault(plan, []).append((run.seconds / run.batch, (run, predicted)))
    most = 2 * max(spreads(rows))
    return [
        row
        for same in alike.values()
        if len(same) > 2
        for each, row in same
        if abs(each / statistics.median(each for each, _ in same) - 1) > most
    ]


def plan_groups(rows: Sequence[Row], least: int = 3) -> list[Group]:
    """Timed runs by all that they have in common but the plan: groups of at least so many different plans."""
    found: dict[tuple[Any, ...], dict[tuple[tuple[str, Any], ...], list[tuple[float, float]]]] = {}
    for run, predicted in rows:
        if run.seconds is None:
            continue
        model = (run.source, run.framework, run.layers, run.width, run.heads, run.tokens, run.dtype)
        plans = found.setdefault(
            (*model, run.recompute, run.recomputed, run.batch, run.device, run.model, run.devices), {}
        )
        settings = {
            "tensor": run.tensor,
            "pipeline": run.pipeline,
            "data": run.data,
            "context": run.context,
            "chunks": run.chunks,
            "microbatch": run.microbatch,
            "zero": run.zero,
            "overlap": run.overlaps,
        }
        plans.setdefault(tuple(settings.items()), []).append((run.seconds, predicted.seconds))
    return [
        (str(key[-2]), int(key[-1]), tuple(_plan(settings, pairs) for settings, pairs in plans.items()))
        for key, plans in found.items()
        if len(plans) >= least
    ]


def _plan(settings: tuple[tuple[str, Any], ...], pairs: Sequence[tuple[float, float]]) -> Plan:
    published, predicted = zip(*pairs, strict=True)
    return Plan(settings, statistics.median(published), statistics.median(predicted), published)


def group_taus(rows: Sequence[Row], least: float = 0.0) -> list[tuple[str, int, int, float]]:
    """Kendall's tau within groups of three different plans or more: (model, devices, plans, tau).

    Pairs whose published times differ by less than the part `least` do not count.
    """
    return [
        (model, devices, len(plans), tau([p.published for p in plans], [p.predicted for p in plans], least))
        for model, devices, plans in plan_groups(rows)
    ]


def spreads(rows: Sequence[Row]) -> list[float]:
    """Of each plan of these groups that was published more than once, by how much its slowest time is above its fastest."""
    plans = [plan for _, _, plans in plan_groups(rows) for plan in plans]
    return [max(plan.times) / min(plan.times) - 1 for plan in plans if len(plan.times) > 1] or [math.nan]


def pairs_of(rows: Sequence[Row]) -> Iterator[Pair]:
    """All pairs of plans within groups."""
    for model, devices, plans in plan_groups(rows):
        for one, other in itertools.combinations(plans, 2):
            faster, slower = sorted((one, other), key=lambda plan: plan.published)
            changed = [name for (name, a), (_, b) in zip(faster.settings, slower.settings, strict=True) if a != b]
            yield Pair(
                f"{model} x{devices}",
                faster,
                slower,
                slower.published / faster.published - 1,
                slower.predicted / faster.predicted - 1,
                ", ".join(changed),
            )


def repeated_tau(rows: Sequence[Row]) -> float:
    """What the published times themselves would score against a repetition of the same runs, on average.

    Times vary as those of plans that were published more than once: two normal draws lie this far apart in the median.
    """
    apart = statistics.median(math.log1p(spread) for spread in spreads(rows))
    deviation = apart / statistics.NormalDist().inv_cdf(0.75) / math.sqrt(2)
    draw = random.Random(0)
    groups = [[plan.published for plan in plans] for _, _, plans in plan_groups(rows)]
    scores = [
        statistics.mean(tau(times, [t * math.exp(draw.gauss(0, deviation)) for t in times]) for times in groups)
        for _ in range(DRAWS)
    ]
    return statistics.mean(scores)


def tau(a: list[float], b: list[float], least: float = 0.0) -> float:
    """Kendall's rank correlation, ties counting nothing; without pairs of which `a` differs by less than the part `least`."""
    pairs = [(x, y) for x in range(len(a)) for y in range(x) if abs(a[x] - a[y]) >= least * min(a[x], a[y])]
    agree = sum(math.copysign(1, (a[x] - a[y]) * (b[x] - b[y])) for x, y in pairs if a[x] != a[y] and b[x] != b[y])
    return agree / max(1, len(pairs))
