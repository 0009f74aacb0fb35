"""Describes the differences between two plans.

In:     two plans, of the same program or of two.
Out:    a page: facts that differ, arguments and activations with another sharding, communication per kind and axes; "" if
        nothing differs. Planning time is not compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from autopar.errors import AutoparError
from autopar.plan.decision import Decision
from autopar.plan.words import bytes_text, differences, mesh_text, offloaded_text, padding_text, seconds_text, type_text
from autopar.report.page import MAX_ROWS, Page, Table, collective_totals, levels_text, solver_text
from autopar.report.paths import collapse_paths
from autopar.report.text import page_text

ABSENT = "(not there)"


def diff_text(this: Decision, other: Decision) -> str:
    """The differences as text, in rows: name, value in `this`, value in `other`.

    Raises `AutoparError`: `other` is not a plan.
    """
    check_plan("a plan is compared with a plan.", f"plan.diff({other!r})", other)
    tables = diff_tables(this, other)
    if not tables:
        return ""
    return page_text(Page(f"{pair_title(this, other)}: what differs", (), tuple(tables)))


def check_plan(summary: str, given: str, plan: object, kinds: Any = Decision) -> None:
    """Check that this is a plan, or of other `kinds`. Raises `AutoparError`: it is not."""
    if not isinstance(plan, kinds):
        do = "pass what step.plan(...) returns, or Plan.load(path)."
        raise AutoparError(summary, given=given, wrong=f"it is of type {type(plan).__name__}.", do=do)


def pair_title(this: Decision, other: Decision) -> str:
    """The title of a page of two plans."""
    names = f"`{this.name}`" if this.name == other.name else f"`{this.name}` and `{other.name}`"
    return f"Two plans of {names}"


def diff_tables(this: Decision, other: Decision) -> list[Table]:
    """The differences as tables; tables without a difference are left out."""
    tables = (_facts(this, other), _values(this, other, False), _values(this, other, True), _collectives(this, other))
    return [table for table in tables if table.rows or table.note]


def _facts(this: Decision, other: Decision) -> Table:
    rows = differences(dict(_fact_pairs(this)), dict(_fact_pairs(other)))
    return Table("Whole step", ("", "this", "other"), tuple((name, a or "", b or "") for name, a, b in rows))


def _fact_pairs(plan: Decision) -> Iterator[tuple[str, str]]:
    cost = plan.cost
    yield "step", plan.name
    yield "program", plan.fingerprints.get("program", "")
    yield "method", plan.method
    yield "machine", plan.machine
    yield "cluster", plan.fingerprints.get("cluster", "")
    yield "meshes", "; ".join(dict.fromkeys(mesh_text(stage.logical_mesh) for stage in plan.stages))
    yield "stages", str(len(plan.stages))
    yield "schedule", plan.schedule
    yield "microbatches", str(plan.num_microbatches)
    yield "padded", padding_text(dict(plan.padded)) if plan.padded else ""
    yield "on the hosts", offloaded_text(len(plan.offloaded), plan.offloaded_activations)
    yield "recomputed", levels_text(plan)
    yield "memory budget", bytes_text(plan.budget_bytes)
    yield "step time", seconds_text(cost.step_seconds)
    yield "  compute", seconds_text(cost.compute_seconds)
    yield "  communication", seconds_text(cost.communication_seconds)
    yield "  of it exposed", seconds_text(cost.exposed_communication_seconds)
    yield "peak memory", ", ".join(map(bytes_text, cost.peak_bytes))
    yield "arguments", bytes_text(cost.argument_bytes)
    yield "solver", solver_text(cost.solver_status, cost.optimality_gap)


def _values(this: Decision, other: Decision, activations: bool) -> Table:
    a, b = _by_name(this, activations), _by_name(other, activations)
    if activations and this.values and other.values and bool(a) != bool(b):
        which = "this" if not a else "other"
        note = f"{which} is cut into stages, whose activations are not listed"
        return Table("Activations", (), (), (), note)
    changed = [(name, (x or ABSENT, y or ABSENT)) for name, x, y in differences(a, b)]
    merged = [(name, texts, 1) for name, texts in changed] if activations else collapse_paths(changed)
    rows = [(path, *texts) for path, texts, _ in merged]
    note = f"and {len(rows) - MAX_ROWS} more" if len(rows) > MAX_ROWS else ""
    title = "Activations" if activations else "Arguments and results"
    return Table(title, ("operation" if activations else "path", "this", "other"), tuple(rows[:MAX_ROWS]), (), note)


def _by_name(plan: Decision, activations: bool) -> dict[str, str]:
    """Type and sharding of each value by name; for several values of one name, all that occur."""
    found: dict[str, Counter[str]] = {}
    for value in plan.values:
        if (value.role == "activation") == activations:
            found.setdefault(value.name, Counter())[f"{type_text(value.shape, value.dtype)} {value.sharding_text}"] += 1
    return {
        name: "\n".join(text if n == 1 else f"{n} x {text}" for text, n in counts.items())
        for name, counts in found.items()
    }


def _collectives(this: Decision, other: Decision) -> Table:
    changed = differences(_totals(this), _totals(other))
    rows = tuple((kind, ",".join(axes), a or ABSENT, b or ABSENT) for (kind, axes), a, b in changed)
    return Table("Communication in one step", ("collective", "axes", "this", "other"), rows)


def _totals(plan: Decision) -> dict[tuple[str, tuple[str, ...]], str]:
    return {
        key: f"{times} x, {bytes_text(num_bytes)}, {seconds_text(seconds)}"
        for key, (times, num_bytes, seconds, _) in collective_totals(plan, lambda c: (c.kind, c.axes)).items()
    }
