"""Writes the content of a plan's page: facts and tables of text, without a layout.

In:     the plan, a `Decision` from the planner or from a file.
Out:    `Page`; `text.py` prints it, `html.py` renders it for a notebook.
Method: repetitions are merged: paths that differ in a number are written `layers/{0..23}/kernel`, activations of the same line
        and shape are counted, collectives of the same operation are added up. What limits a pipeline is its busiest mesh: a
        step lasts as long as that works and waits, for earlier stages before its first microbatch (the pipeline fills), for
        activations and gradients between its microbatches, and for other stages after its last (the pipeline drains).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from autopar.cost import collective_seconds
from autopar.grouping import grouped, summed
from autopar.intra_op.sharded import Collective
from autopar.plan.decision import Decision, Recomputed, Value
from autopar.plan.words import (
    bytes_text,
    count_text,
    mesh_text,
    offloaded_text,
    padding_text,
    seconds_text,
    share_text,
    type_text,
)
from autopar.report.paths import collapse_paths, numbers_text
from autopar.streams.schedules import SCHEDULES
from autopar.streams.timeline import Event, timetable_text

_Key = TypeVar("_Key", bound=Hashable)

MAX_ROWS = 32
"""The most rows of a table: longer ones show their largest rows."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text; `numbers`: columns of numbers, `names`: columns whose text stays on one line."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: tuple[int, ...] = ()
    note: str = ""
    names: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """A title, facts by name, tables; `drawing`: text of fixed width between facts and tables."""

    title: str
    facts: tuple[tuple[str, str], ...]
    tables: tuple[Table, ...]
    drawing: str = ""


def page_of(plan: Decision) -> Page:
    """The page of a plan."""
    is_pipeline = not plan.is_one_program
    tables = (_stages(plan), _arguments(plan)) if is_pipeline else (_arguments(plan), _activations(plan))
    drawing = timetable_text(plan.events.events) if is_pipeline else ""
    return Page(f"Plan of `{plan.name}`", tuple(_facts(plan)), (*tables, _collectives(plan)), drawing)


def _facts(plan: Decision) -> Iterable[tuple[str, str]]:
    cost = plan.cost
    yield "method", plan.method
    if plan.machine:
        yield "machine", plan.machine
    if plan.is_one_program:
        yield "mesh", mesh_text(plan.mesh)
        hidden = cost.communication_seconds - cost.exposed_communication_seconds
        is_some = hidden > 1e-3 * cost.communication_seconds
        idle = f"({seconds_text(hidden)} more hidden behind it)" if is_some else "(none of it hidden)"
    else:
        yield "pipeline", f"{_stages_text(plan)}, schedule {plan.schedule}"
        share = cost.bubble_seconds / cost.step_seconds if cost.step_seconds else 0.0
        idle = f"+ {seconds_text(cost.bubble_seconds)} waiting ({share:.0%}; simulated, on average over the devices)"
    if plan.num_microbatches > 1:
        yield "microbatches", _microbatches(plan)
    if plan.padded:
        yield "padded", f"{padding_text(dict(plan.padded))} inside the step; arguments and results are as they were"
    if _nothing_is_split(plan):
        yield "split", f"nothing: this step is too small, all {plan.mesh.num_devices} devices compute the same"
    if any(stage.recomputed.level for stage in plan.stages):
        more = sum(stage.recomputed.seconds for stage in plan.stages)
        yield "recomputed", f"{levels_text(plan)}; {seconds_text(more)} of work, all stages together"
    parts = f"{seconds_text(cost.compute_seconds)} compute + {seconds_text(cost.exposed_communication_seconds)} communication"
    yield "step time", f"{seconds_text(cost.step_seconds)} predicted = {parts} {idle}"
    if not plan.is_one_program:
        yield from _limited_by(plan)
    if plan.schedule == SCHEDULES["inference"].name:
        each = seconds_text(plan.interval_seconds)
        yield "calls", f"one every {each}, where they do not wait for each other's results"
    yield from _figures(plan)
    budget = f" of {bytes_text(plan.budget_bytes)}" if math.isfinite(plan.budget_bytes) else ""
    peak = f"{bytes_text(max(cost.peak_bytes))}{budget} on each device at the peak"
    yield "memory", f"{peak}; {bytes_text(cost.argument_bytes)} of arguments"
    if cost.host_bytes:
        own = offloaded_text(len(plan.offloaded), plan.offloaded_activations)
        yield "host memory", f"{bytes_text(cost.host_bytes)} for each device at the peak{own and f'; {own} wait there'}"
    yield "solver", solver_text(cost.solver_status, cost.optimality_gap)
    if cost.search.ended_early:
        yield "search", f"ended early: {cost.search.ended_early}"
    yield "planning", seconds_text(cost.planning_seconds)
    for k, text in enumerate(_also_tried(plan)):
        yield "" if k else "also tried", text


def _figures(plan: Decision) -> Iterable[tuple[str, str]]:
    """Utilization, rate, bytes sent, energy and price, as far as they are known."""
    cost, figures = plan.cost, plan.cost.figures
    if figures.model_seconds:
        again = f", {share_text(cost.hfu)} with what is computed again" if cost.hfu > 1.01 * cost.mfu else ""
        rate = f"; {cost.rate:,.4g} {figures.unit}/s" if figures.amount else ""
        yield "use", f"MFU {share_text(cost.mfu)} of the devices' peak{again}{rate}"
    if figures.link_bytes:
        parts = [f"{bytes_text(num_bytes)} {level}" for level, num_bytes in figures.link_bytes]
        yield "sent", f"by each device in a step: {', '.join(parts)}"
    if cost.joules is not None:
        yield "energy", f"{cost.joules:,.4g} J a step at the devices' rated power"
    if cost.price is not None:
        yield "price", f"{cost.price:,.4g} a step, {figures.price_per_hour:,.4g} an hour"


def _nothing_is_split(plan: Decision) -> bool:
    """Whether the step is on one mesh of several devices, each of which holds every value whole."""
    is_one_mesh = plan.is_one_program and plan.mesh.num_devices > 1
    return is_one_mesh and not plan.cost.collectives and not any(any(v.sharding.dims) for v in plan.values)


def _stages_text(plan: Decision) -> str:
    """The number of stages, and of stages per mesh if they share meshes, as text."""
    num_stages, num_meshes = len(plan.stages), len({stage.submesh for stage in plan.stages})
    text = count_text(num_stages, "stage")
    return text if num_meshes == num_stages else f"{text} on {num_meshes} meshes, {num_stages // num_meshes} on each"


def _limited_by(plan: Decision) -> Iterable[tuple[str, str]]:
    limit, step = find_limit(plan.events.events), plan.cost.step_seconds
    if limit is None or not step:
        return
    waits = [
        f"{seconds_text(seconds)} {where}"
        for seconds, where in (
            (limit.fill_seconds, "until its first microbatch"),
            (limit.gap_seconds, "between microbatches"),
            (limit.drain_seconds, "after its last"),
        )
        if seconds > 1e-3 * step
    ]
    stages = ("stage " if len(limit.stages) == 1 else "stages ") + numbers_text(limit.stages)
    busy = f"{stages}, busy for {seconds_text(limit.busy_seconds)} ({limit.busy_seconds / step:.0%})"
    sends = f"The busiest sender sends for {seconds_text(limit.transfer_seconds)}."
    yield "limited by", "; waits ".join([busy, *([", ".join(waits)] if waits else [])]) + f". {sends}"


def _also_tried(plan: Decision) -> list[str]:
    """The other candidates, each once: by predicted time, with the difference to the plan; then those that failed."""
    seconds_of: dict[str, float] = {}
    failed: dict[str, str] = {}
    for what, outcome in plan.alternatives:
        match = _SECONDS.fullmatch(outcome)
        if match:
            seconds_of[what] = min(seconds_of.get(what, math.inf), float(match[1]))
        else:
            failed[what] = outcome
    step = plan.cost.step_seconds
    lines = []
    for what, seconds in sorted(seconds_of.items(), key=lambda item: item[1]):
        more = f"{seconds / step - 1:+.1%}" if step and abs(seconds / step - 1) >= 5e-4 else "as fast"
        if not (what == _chosen(plan) and more == "as fast"):
            lines.append(f"{what}: {seconds_text(seconds)} ({more})")
    return lines + [f"{what}: {outcome}" for what, outcome in failed.items()]


_SECONDS = re.compile(r"([0-9]+(?:\.[0-9]+)?e[+-]?[0-9]+) s")
"""An outcome that is a time, in the planner's format."""


def _chosen(plan: Decision) -> str:
    """The plan itself, as the search describes it."""
    sizes = "+".join(str(stage.submesh.num_devices) for stage in plan.stages)
    return f"{len(plan.stages)} stages on {sizes}, {plan.num_microbatches} microbatches, {plan.schedule}"


def _microbatches(plan: Decision) -> str:
    exact = plan.microbatch_semantics == "exact"
    meaning = "the same function as the whole batch" if exact else "batch statistics are those of each microbatch"
    return f"{plan.num_microbatches}, {meaning}"


@dataclass(frozen=True, slots=True)
class Limit:
    """The busiest mesh of a step: its work, and its idle time before, between and after its microbatches.

    `transfer_seconds`: the busiest sender's time.
    """

    mesh: int
    stages: tuple[int, ...]
    busy_seconds: float
    fill_seconds: float
    gap_seconds: float
    drain_seconds: float
    transfer_seconds: float


def find_limit(events: Sequence[Event]) -> Limit | None:
    """The limit of a step; None: nothing runs."""
    runs = grouped((e.mesh, e) for e in events if e.kind != "transfer")
    sends = grouped((e.mesh, e.end - e.start) for e in events if e.kind == "transfer")
    if not runs:
        return None
    busy = {mesh: sum(e.end - e.start for e in of_mesh) for mesh, of_mesh in runs.items()}
    mesh = max(busy, key=lambda m: (busy[m], -m))
    own = runs[mesh]
    looped = [e for e in own if e.kind in ("F", "B", "W")] or own
    first, last = min(e.start for e in looped), max(e.end for e in looped)
    end = max(e.end for e in events)

    def idle(start: float, stop: float) -> float:
        worked = sum(max(0.0, min(e.end, stop) - max(e.start, start)) for e in own)
        return max(0.0, stop - start - worked)

    return Limit(
        mesh,
        tuple(sorted({e.stage for e in own})),
        busy[mesh],
        idle(0.0, first),
        idle(first, last),
        idle(last, end),
        max(map(sum, sends.values()), default=0.0),
    )


def levels_text(plan: Decision) -> str:
    """The stages' levels of recomputation, as the user would write them."""
    names = {0.0: "'cheap'", math.inf: "'all'"}
    levels = [names.get(stage.recomputed.level, f"{stage.recomputed.level:g}") for stage in plan.stages]
    return f"recompute={levels[0]}" if len(set(levels)) == 1 else f"recompute=({', '.join(levels)})"


def _recomputed(recomputed: Recomputed) -> tuple[str, str]:
    """What a stage keeps for a microbatch, and what it recomputes, as text."""
    kept = bytes_text(recomputed.kept_bytes)
    if not recomputed.operations:
        return kept, "what is cheap"
    instead = bytes_text(recomputed.kept_bytes + recomputed.saved_bytes)
    again = f"{count_text(recomputed.operations, 'operation')}, {seconds_text(recomputed.seconds)}"
    return f"{kept}, not {instead}", again


def _stages(plan: Decision) -> Table:
    rows = []
    recomputes = any(stage.recomputed.level for stage in plan.stages)
    for number, stage in enumerate(plan.stages):
        mesh = ", ".join(f"{axis}={size}" for axis, size in stage.logical_mesh.axis_sizes.items())
        busy = sum(e.end - e.start for e in plan.events.events if e.stage == number and e.kind != "transfer")
        sends = sum(e.end - e.start for e in plan.events.events if e.stage == number and e.kind == "transfer")
        peak = bytes_text(plan.cost.peak_bytes[number])
        again = _recomputed(stage.recomputed) if recomputes else ()
        times = seconds_text(busy), seconds_text(sends)
        rows.append((str(number), str(stage.submesh), mesh, *times, peak, *again, *stage.operations))
    note = 'plan.explain("stages") says what crosses the borders, and where else they could be.'
    columns = ("kept in flight", "run again") if recomputes else ()
    columns = ("stage", "devices", "mesh", "busy", "sends", "peak memory", *columns, "from", "to")
    return Table("Stages", columns, tuple(rows), (0, 3, 4, 5), note if len(rows) > 1 else "")


def solver_text(status: str, gap: float) -> str:
    """The solver's status and gap, as text."""
    if status == "optimal" and gap < 1e-5:
        return "optimal: under these costs no sharding on this mesh is cheaper (gap 0)"
    return (
        f"{status}: at most {gap:.2%} above the cheapest on this mesh"
        if math.isfinite(gap)
        else f"{status}, no bound known"
    )


def merged_values(plan: Decision) -> Iterator[tuple[Value, int, int]]:
    """Values, those that differ in a number merged: (value, how many, bytes on a device of one of them).

    Arguments and results first, then activations.
    """
    arguments = [
        (v.name, (v.role, v.shape, v.dtype, v.sharding, v.stage, v.on_host))
        for v in plan.values
        if v.role != "activation"
    ]
    merged = [(Value(path, *key), count) for path, key, count in collapse_paths(arguments)]
    merged += Counter(v for v in plan.values if v.role == "activation").items()
    for v, count in merged:
        yield v, count, v.sharding.local_bytes(v.shape, v.dtype, plan.stages[v.stage].logical_mesh)


def _arguments(plan: Decision) -> Table:
    staged = ("stage",) if len(plan.stages) > 1 else ()
    rows = []
    for v, count, each in merged_values(plan):
        if v.role != "activation":
            stage, size = (str(v.stage) for _ in staged), each * count
            row = v.name, v.role, *stage, type_text(v.shape, v.dtype), v.sharding_text, str(count), bytes_text(size)
            rows.append((size, row))
    columns = ("path", "role", *staged, "type", "sharding", "arrays", "per device")
    return _largest("Arguments and results", columns, rows)


def _activations(plan: Decision) -> Table:
    rows = [
        (each * count, (v.name, type_text(v.shape, v.dtype), str(v.sharding), str(count), bytes_text(each)))
        for v, count, each in merged_values(plan)
        if v.role == "activation"
    ]
    columns = ("operation", "type", "sharding", "arrays", "each, per device")
    return _largest("Activations that go through memory", columns, rows)


def collective_totals(plan: Decision, key: Callable[[Collective], _Key]) -> dict[_Key, tuple[int, int, float, float]]:
    """Totals of the collectives by key: executions, bytes, seconds, and exposed seconds."""
    seconds = [
        collective_seconds(c.kind, c.bytes, c.axes, plan.stages[c.stage].logical_mesh) for c in plan.cost.collectives
    ]
    each = zip(plan.cost.collectives, seconds, plan.cost.exposed_seconds, strict=True)
    return summed((key(c), (c.times, c.times * c.bytes, c.times * own, exposed)) for c, own, exposed in each)


def _collectives(plan: Decision) -> Table:
    totals = collective_totals(plan, lambda c: (c.kind, c.axes, c.operation))
    order = sorted(totals.items(), key=lambda item: -item[1][2])
    rows = [
        (kind, ",".join(axes), str(times), bytes_text(size), seconds_text(seconds), seconds_text(exposed), operation)
        for (kind, axes, operation), (times, size, seconds, exposed) in order
    ]
    note = "none: no device waits for another" if not rows else ""
    if len(rows) > MAX_ROWS:
        rest = sum(total[2] for _, total in order[MAX_ROWS:])
        note = f"and {len(rows) - MAX_ROWS} more, {seconds_text(rest)} together: plan.cost.collectives has them all"
    return Table(
        "Communication in one step",
        ("collective", "axes", "times", "bytes", "seconds", "exposed", "for"),
        tuple(rows[:MAX_ROWS]),
        (2, 3, 4, 5),
        note,
    )


def _largest(title: str, columns: tuple[str, ...], rows: Sequence[tuple[int, tuple[str, ...]]]) -> Table:
    """A table of the largest rows, in their given order, with a note on how many are left out; `rows`: (bytes, cells)."""
    order = sorted(range(len(rows)), key=lambda k: (-rows[k][0], k))[:MAX_ROWS]
    note = f"and {len(rows) - MAX_ROWS} smaller ones: plan.values has them all" if len(rows) > MAX_ROWS else ""
    numbers = (len(columns) - 2, len(columns) - 1)
    return Table(title, columns, tuple(rows[k][1] for k in sorted(order)), numbers, note)
