"""Predicted against published: every fully specified run of a table, as it was run.

    python benchmarks/published.py [--data FILE] [--rows N] [--json OUT] [--plot PNG]

Prints predicted over published step times by source, the median error, the part within 30 %, rank correlations, memory and
verdicts on it, which rows are left out and why, and how the few fitted numbers do on sources they were not fitted to.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from published_runs import DATA, Left, Run, read_runs, tau
from published_steps import Prediction, predict
from rich.console import Console
from rich.table import Table

from autopar.errors import AutoparError
from autopar.mesh import find_device

Row = tuple[Run, Prediction]
NOISE = 0.02
"""Times that differ by less are taken for equal in one of the two figures on order."""


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--rows", type=int, default=None, help="only so many rows, spread over the table")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--plot", type=Path, default=None)
    chosen = parser.parse_args()
    runs, left = read_runs(chosen.data)
    step = max(1, len(runs) // chosen.rows) if chosen.rows else 1
    rows: list[Row] = []
    for run in runs[::step]:
        try:
            rows.append((run, predict(run)))
        except AutoparError as error:
            left.append(Left(run.source, run.line, error.summary))
    console = Console(width=120)
    timed = [row for row in rows if row[0].seconds is not None and not row[0].ranks_only]
    console.print(_by_source(timed))
    for line in (*_figures(rows, timed), *_left_out(left)):
        console.print(line, highlight=False)
    if chosen.json:
        chosen.json.write_text(json.dumps([{**asdict(run), **asdict(p), "published": run.seconds} for run, p in rows]))
    if chosen.plot:
        _scatter(timed, chosen.plot)


def error_of(row: Row) -> float:
    """Predicted over published, less 1."""
    run, predicted = row
    assert run.seconds is not None
    return predicted.seconds / run.seconds - 1


def _by_source(rows: Sequence[Row]) -> Table:
    table = Table(title="predicted over published step time")
    for heading in ("source", "device", "runs", "median", "least", "most", "median error", "within 30 %"):
        table.add_column(heading, justify="left" if heading in ("source", "device") else "right")
    groups: dict[tuple[str, str], list[float]] = {}
    for run, predicted in rows:
        groups.setdefault((run.source, run.device.split(" ")[0]), []).append(error_of((run, predicted)))
    for (source, device), errors in groups.items():
        ratios = [1 + e for e in errors]
        table.add_row(
            source[:44],
            device,
            str(len(errors)),
            *(f"{x:.2f}" for x in (statistics.median(ratios), min(ratios), max(ratios))),
            f"{statistics.median(map(abs, errors)):.1%}",
            f"{_share(abs(e) <= 0.3 for e in errors):.0%}",
        )
    return table


def _figures(rows: Sequence[Row], timed: Sequence[Row]) -> Iterable[str]:
    errors = [abs(error_of(row)) for row in timed]
    yield f"runs {len(timed)}: median error {statistics.median(errors):.1%}, within 30 % {_share(e <= 0.3 for e in errors):.1%}"
    by_source: dict[str, list[float]] = collections.defaultdict(list)
    for row in timed:
        by_source[row[0].source].append(abs(error_of(row)))
    yield f"each source counting once: median error {statistics.mean(map(statistics.median, by_source.values())):.1%}"
    yield (
        "fitted numbers: per family of devices 3 (the rate of fused attention, of the first and of later kernels, and which of "
        "the datasheet's rates products have that tensor cores cannot load); for all together 3 (the part of the best "
        "product's rate that training holds, passes of frameworks without a compiler, launches under a profiler); of memory "
        "1 (what PyTorch's allocator keeps back)"
    )
    out = f"{left_out_error(timed):.1%}"
    yield f"the part of the best product's rate fitted to all sources but the one it is judged by: median error {out}"
    taus = group_taus(rows)
    if taus:
        text = ", ".join(f"{model} x{devices}: {value:.2f} of {count}" for model, devices, count, value in taus)
        yield f"Kendall's tau within {len(taus)} groups of plans, on average {statistics.mean(t[3] for t in taus):.2f} ({text})"
        apart = statistics.mean(t[3] for t in group_taus(rows, NOISE))
        yield f"the same, of pairs whose published times are at least {NOISE:.0%} apart: {apart:.2f}"
        again = spreads(rows)
        yield (
            f"of these plans {len(again)} were published more than once, their times "
            f"{statistics.median(again):.1%} apart, {max(again):.1%} at most"
        )
    published = [_mfu(run, run.seconds) for run, _ in timed]
    predicted = [_mfu(run, p.seconds) for run, p in timed]
    yield f"rank correlation of MFU {_spearman(published, predicted):.2f}"
    memory = [p.memory_bytes / 2**30 / run.memory_gib for run, p in rows if run.memory_gib]
    if memory:
        near = _share(abs(m - 1) <= 0.1 for m in memory)
        yield f"memory of {len(memory)} runs: median ratio {statistics.median(memory):.2f}, within 10 % {near:.0%}"
    verdicts = [(run.seconds is None) == (p.needed_bytes > p.capacity_bytes) for run, p in rows]
    failed = [p.needed_bytes > p.capacity_bytes for run, p in rows if run.seconds is None]
    yield f"verdicts on memory: {_share(verdicts):.0%} of {len(verdicts)} right; of {len(failed)} that ran out, {sum(failed)}"


def left_out_error(rows: Sequence[Row]) -> float:
    """Median error where every source is judged with a rate of products fitted to the other sources only.

    The rate scales the seconds of kernels, the others stay.
    """
    sources = list(dict.fromkeys(run.source for run, _ in rows))
    scales = [0.8 + 0.02 * k for k in range(21)]

    def errors(source: str, scale: float) -> list[float]:
        of_source = [row for row in rows if row[0].source == source]
        return [
            abs((p.seconds + (scale - 1) * p.compute) / run.seconds - 1)
            for run, p in of_source
            if run.seconds is not None
        ]

    table = {(source, scale): errors(source, scale) for source in sources for scale in scales}
    found: list[float] = []
    for judged in sources:
        others = [source for source in sources if source != judged] or [judged]
        best = min(scales, key=lambda scale: statistics.mean(statistics.median(table[s, scale]) for s in others))
        found += table[judged, best]
    return statistics.median(found)


Group = dict[tuple[Any, ...], list[tuple[float, float]]]
"""Plans of the same model, devices, batch and framework: each with its published and predicted seconds, as often as it ran."""


def plan_groups(rows: Sequence[Row]) -> dict[tuple[Any, ...], Group]:
    """Timed runs by all that they have in common but the plan; the key ends with devices, their kind and the model."""
    groups: dict[tuple[Any, ...], Group] = {}
    for run, predicted in rows:
        if run.seconds is None:
            continue
        model = (run.source, run.framework, run.layers, run.width, run.heads, run.tokens, run.dtype, run.recompute)
        group = groups.setdefault((*model, run.batch, run.devices, run.device, run.model), {})
        plan = (run.tensor, run.pipeline, run.data, run.context, run.chunks, run.microbatch, run.zero, run.overlaps)
        group.setdefault(plan, []).append((run.seconds, predicted.seconds))
    return groups


def group_taus(rows: Sequence[Row], least: float = 0.0) -> list[tuple[str, int, int, float]]:
    """Kendall's tau within groups of three different plans or more: (model, devices, plans, tau).

    A plan that was measured several times counts once, by its median; pairs whose published times differ by less than the
    part `least` do not count.
    """
    found = []
    for key, group in plan_groups(rows).items():
        if len(group) >= 3:
            medians = [tuple(statistics.median(side) for side in zip(*pairs, strict=True)) for pairs in group.values()]
            published, predicted_seconds = (list(side) for side in zip(*medians, strict=True))
            found.append((str(key[-1]), int(key[-3]), len(group), tau(published, predicted_seconds, least)))
    return found


def spreads(rows: Sequence[Row]) -> list[float]:
    """Of each plan of these groups that was published more than once, by how much its slowest time is above its fastest."""
    groups = [group for group in plan_groups(rows).values() if len(group) >= 3]
    again = [[published for published, _ in pairs] for group in groups for pairs in group.values()]
    return [max(times) / min(times) - 1 for times in again if len(times) > 1] or [math.nan]


def _mfu(run: Run, seconds: float | None) -> float:
    assert seconds is not None
    try:
        peak = find_device(run.device).device.product_flops_per_second([_peak_dtype(run)])
    except AutoparError:
        peak = 989.5e12
    return run.flops / run.devices / seconds / peak


def _peak_dtype(run: Run) -> str:
    return "float8_e4m3fn" if run.dtype == "float8" else run.dtype


def _spearman(a: Sequence[float], b: Sequence[float]) -> float:
    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(range(len(values)), key=values.__getitem__)
        place = [0.0] * len(values)
        for rank, at in enumerate(order):
            place[at] = float(rank)
        return place

    return statistics.correlation(ranks(a), ranks(b)) if len(a) > 1 else math.nan


def _share(values: Iterable[bool]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else math.nan


def _left_out(left: Sequence[Left]) -> Iterable[str]:
    reasons = collections.Counter(row.reason for row in left)
    yield f"left out {len(left)} rows: " + "; ".join(f"{count}: {reason}" for reason, count in reasons.most_common())


def _scatter(rows: Sequence[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 6))
    sources: dict[str, tuple[list[float], list[float]]] = {}
    for run, predicted in rows:
        found = sources.setdefault(run.source.split(" (")[0][:30], ([], []))
        found[0].append(run.seconds or 0.0)
        found[1].append(predicted.seconds)
    for name, (published, seconds) in sources.items():
        axes.scatter(published, seconds, s=14, label=name, alpha=0.8)
    ends = [min(run.seconds or 1 for run, _ in rows) / 1.5, max(run.seconds or 1 for run, _ in rows) * 1.5]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    for factor in (0.7, 1.3):
        axes.plot(ends, [factor * e for e in ends], color="grey", linewidth=0.6, linestyle="--")
    axes.set(xscale="log", yscale="log", xlabel="published seconds per step", ylabel="predicted", xlim=ends, ylim=ends)
    axes.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


Predict = Callable[[Run], Prediction]

if __name__ == "__main__":
    main()
