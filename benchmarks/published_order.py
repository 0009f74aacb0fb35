"""Compares the predicted and the published order of plans of one model.

In:     runs, each with its prediction.
Out:    Kendall's tau within groups of plans, the pairs in the wrong order, and the tau that a repetition of the runs would
        reach.
Method: plans of the same model, devices, batch and framework are a group. A plan that ran several times counts once, by its
        median; the spread of its times says how much of an order is chance. What a source says not to compare, because the
        machine or the program was another one, is left out of every figure but the plain one.
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
LANES = ("compute", "tensor", "bubble", "data", "update")
"""Of a prediction; the rest of its seconds stages wait for each other's sends."""
DRAWS = 500
"""Of made-up repetitions, to see what repeating the same plans would score."""


@dataclass(frozen=True)
class Plan:
    """One of a group: what it sets, its median seconds, and where those that are predicted go."""

    settings: tuple[tuple[str, Any], ...]
    published: float
    predicted: float
    times: tuple[float, ...]
    lanes: dict[str, float]


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


def contradicted(rows: Sequence[Row]) -> list[tuple[Row, float]]:
    """Timed runs that other rows contradict, and the seconds that follow from those: the same plan was published several times,
    also with other batches.

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
        (row, statistics.median(each for each, _ in same) * row[0].batch)
        for same in alike.values()
        if len(same) > 2
        for each, row in same
        if abs(each / statistics.median(each for each, _ in same) - 1) > most
    ]


def plan_groups(rows: Sequence[Row], least: int = 3, comparable: bool = True) -> list[Group]:
    """Timed runs by all that they have in common but the plan: groups of at least so many different plans.

    Args:
        comparable: Leave apart what its source says not to compare.
    """
    found: dict[tuple[Any, ...], dict[tuple[tuple[str, Any], ...], list[tuple[float, Prediction]]]] = {}
    for run, predicted in rows:
        if run.seconds is None:
            continue
        model = (
            run.source,
            run.framework,
            run.layers,
            run.width,
            run.heads,
            run.tokens,
            run.dtype,
            comparable and run.apart,
        )
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
        plans.setdefault(tuple(settings.items()), []).append((run.seconds, predicted))
    return [
        (str(key[-2]), int(key[-1]), tuple(_plan(settings, pairs) for settings, pairs in plans.items()))
        for key, plans in found.items()
        if len(plans) >= least
    ]


def _plan(settings: tuple[tuple[str, Any], ...], pairs: Sequence[tuple[float, Prediction]]) -> Plan:
    published, predicted = zip(*pairs, strict=True)
    lanes = {name: float(getattr(predicted[0], name)) for name in LANES}
    lanes["sends"] = predicted[0].seconds - sum(lanes.values())
    return Plan(
        settings, statistics.median(published), statistics.median(p.seconds for p in predicted), published, lanes
    )


def group_taus(rows: Sequence[Row], least: float = 0.0, comparable: bool = True) -> list[tuple[str, int, int, float]]:
    """Kendall's tau within groups of three different plans or more: (model, devices, plans, tau).

    Pairs whose published times differ by less than the part `least` do not count.
    """
    return [
        (model, devices, len(plans), tau([p.published for p in plans], [p.predicted for p in plans], least))
        for model, devices, plans in plan_groups(rows, comparable=comparable)
    ]


def possible_tau(rows: Sequence[Row]) -> float:
    """What predictions would score that are right about every run but those that others contradict, of which they say what
    follows from the others."""
    otherwise = {row[0]: seconds for row, seconds in contradicted(rows)}
    exact = [(run, replace(p, seconds=otherwise.get(run, run.seconds))) for run, p in rows if run.seconds is not None]
    return statistics.mean(value for *_, value in group_taus(exact))


def spreads(rows: Sequence[Row]) -> list[float]:
    """Of each plan of these groups that was published more than once, by how much its slowest time is above its fastest."""
    plans = [plan for _, _, plans in plan_groups(rows) for plan in plans]
    # One time in two tables is one run.
    return [max(plan.times) / min(plan.times) - 1 for plan in plans if len(set(plan.times)) > 1] or [math.nan]


def noise_of(rows: Sequence[Row]) -> float:
    """How far two runs of one plan are apart: the root mean square, since few are and those far."""
    return math.sqrt(statistics.mean(spread**2 for spread in spreads(rows)))


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

    Times vary as those of plans that were published more than once, of which two draws lie this far apart.
    """
    deviation = math.log1p(noise_of(rows)) / math.sqrt(2)
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
