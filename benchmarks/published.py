"""Predicted against published step times: every fully specified run of a table, as it was run.

    python benchmarks/published.py [--data FILE] [--rows N] [--stated] [--json OUT] [--plot PNG] [--pairs]

Prints predicted over published step times by source, the median error, the part within 30 %, rank correlations, memory and
verdicts whether a run fits, and the error of the few fitted numbers on sources they were not fitted to; separately, the rows
that leave something open; and which rows are left out and why.
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

from published_choices import settle
from published_machines import model_of
from published_order import Row, contradicted, group_taus, noise_of, pairs_of, possible_tau, repeated_tau, spreads
from published_runs import DATA, Left, Run, read_runs
from published_steps import Prediction
from rich.console import Console
from rich.table import Table

from autopar.errors import AutoparError


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--rows", type=int, default=None, help="only so many rows, spread over the table")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--plot", type=Path, default=None)
    parser.add_argument(
        "--stated", action="store_true", help="only rows that leave nothing open, which takes a third of the time"
    )
    parser.add_argument("--pairs", action="store_true", help="list the plans of one model whose order is wrong")
    chosen = parser.parse_args()
    runs, left = read_runs(chosen.data)
    runs = [run for run in runs if not (chosen.stated and run.unstated)]
    step = max(1, len(runs) // chosen.rows) if chosen.rows else 1
    rows: list[Row] = []
    for run in runs[::step]:
        found = predicted(run)
        (left if isinstance(found, Left) else rows).append(found)
    console = Console(width=120)
    # What had to be taken for granted is no judgement on the prediction alone: those rows have figures of their own.
    stated, open_rows = ([row for row in rows if bool(row[0].unstated) == is_open] for is_open in (False, True))
    timed = [row for row in stated if row[0].seconds is not None and not row[0].ranks_only]
    console.print(_by_source(timed, "predicted over published step time"))
    for line in _figures(stated, timed):
        console.print(line, highlight=False)
    others = [row for row in open_rows if row[0].seconds is not None and not row[0].ranks_only]
    if others:
        console.print(_by_source(others, "rows that leave something open"))
    for line in (*_open_figures(others), *_left_out(left)):
        console.print(line, highlight=False)
    if chosen.pairs:
        console.print(_wrong_pairs(stated))
    if chosen.json:
        chosen.json.write_text(json.dumps([_record(run, p) for run, p in rows]))
    if chosen.plot:
        _scatter(timed or others, chosen.plot)


def predicted(run: Run) -> Row | Left:
    """A run with its prediction, or why it has none: a table of strangers' is gone through to its end."""
    try:
        return settle(run)
    except AutoparError as error:
        return Left(run.source, run.line, f"{error.summary} {error.given or ''}".strip())
    except Exception as error:
        return Left(run.source, run.line, f"failed: {type(error).__name__}: {error}")


def _record(run: Run, predicted: Prediction) -> dict[str, object]:
    """A run with its prediction; where both have a name it is the run's, but for the seconds."""
    parts = {"tensor_seconds": predicted.tensor, "data_seconds": predicted.data}
    return {**asdict(predicted), **asdict(run), **parts, "seconds": predicted.seconds, "published": run.seconds}


def error_of(row: Row) -> float:
    """Predicted over published, less 1."""
    run, predicted = row
    assert run.seconds is not None
    return predicted.seconds / run.seconds - 1


def _by_source(rows: Sequence[Row], title: str) -> Table:
    table = Table(title=title)
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


def _open_figures(rows: Sequence[Row]) -> Iterable[str]:
    """Rows that do not say all: nothing was fitted to them, and what they leave open was not published."""
    if not rows:
        return
    errors = [abs(error_of(row)) for row in rows]
    yield (
        f"{len(errors)} more runs, of which a column had to be taken as the fastest that fits, or as is usual: median error "
        f"{statistics.median(errors):.1%}, within 30 % {_share(e <= 0.3 for e in errors):.1%}"
    )
    by_column: dict[str, list[float]] = collections.defaultdict(list)
    for row, error in zip(rows, errors, strict=True):
        for name, _ in row[0].unstated:
            by_column[name].append(error)
    yield "left open, and the median error then: " + ", ".join(
        f"{name} {len(found)} rows {statistics.median(found):.1%}" for name, found in by_column.items()
    )


def _figures(rows: Sequence[Row], timed: Sequence[Row]) -> Iterable[str]:
    if not timed:
        yield "no row says all that decides about its seconds, and when it took place"
        return
    errors = [abs(error_of(row)) for row in timed]
    yield f"runs {len(timed)}: median error {statistics.median(errors):.1%}, within 30 % {_share(e <= 0.3 for e in errors):.1%}"
    by_source: dict[str, list[float]] = collections.defaultdict(list)
    for row in timed:
        by_source[row[0].source].append(abs(error_of(row)))
    yield f"each source counting once: median error {statistics.mean(map(statistics.median, by_source.values())):.1%}"
    yield (
        "fitted numbers: per family of devices 2 (the rates of the first fused attention, and of products that tensor cores "
        "cannot load; of TPUs 1, that of fused attention on units of 256 by 256); for all together 4 (the part of the best "
        "product's rate that training holds, passes of frameworks without a compiler, launches of nanotron, and how much "
        "slower hosts were that were improved afterwards); of memory 2 (what PyTorch's allocator keeps back, with and "
        "without recomputation)"
    )
    out = f"{left_out_error(timed):.1%}"
    yield f"the part of the best product's rate fitted to all sources but the one it is judged by: median error {out}"
    yield from _order(rows)
    published = [_mfu(run, run.seconds) for run, _ in timed]
    predicted = [_mfu(run, p.seconds) for run, p in timed]
    yield f"rank correlation of MFU {_spearman(published, predicted):.2f}"
    memory = {run.line: p.memory_bytes / 2**30 / run.memory_gib for run, p in rows if run.memory_gib}
    if memory:
        apart = ", ".join(f"{ratio:.2f} in line {line}" for line, ratio in memory.items() if abs(ratio - 1) > 0.1)
        near = _share(abs(ratio - 1) <= 0.1 for ratio in memory.values())
        further = f", further off: {apart}" if apart else ""
        median = statistics.median(memory.values())
        yield f"memory of {len(memory)} runs: median ratio {median:.2f}, within 10 % {near:.0%}{further}"
    verdicts = [(run.seconds is None) == (p.needed_bytes > p.capacity_bytes) for run, p in rows]
    failed = [p.needed_bytes > p.capacity_bytes for run, p in rows if run.seconds is None]
    yield f"verdicts on memory: {_share(verdicts):.0%} of {len(verdicts)} right; of {len(failed)} that ran out, {sum(failed)}"


def _order(rows: Sequence[Row]) -> Iterable[str]:
    """Figures on the order of plans of one model."""
    for title, comparable in (("plans", False), ("plans that their sources let compare", True)):
        taus = group_taus(rows, comparable=comparable)
        if not taus:
            return
        text = ", ".join(f"{model} x{devices}: {value:.2f} of {count}" for model, devices, count, value in taus)
        yield f"Kendall's tau within {len(taus)} groups of {title}, on average {_mean_tau(taus):.2f} ({text})"
    again = spreads(rows)
    if math.isnan(again[0]):
        return
    noise = noise_of(rows)
    yield (
        f"of these plans {len(again)} were published more than once, their times {noise:.1%} apart in the root mean square, "
        f"{max(again):.1%} at most: a repetition of all these runs would score {repeated_tau(rows):.2f}"
    )
    apart = [pair for pair in pairs_of(rows) if pair.published >= noise]
    yield (
        f"of {len(apart)} pairs further apart than that {_share(pair.predicted > 0 for pair in apart):.0%} in order; "
        f"tau of these pairs, on average over groups: {_mean_tau(group_taus(rows, noise)):.2f}"
    )
    for (run, _), seconds in contradicted(rows):
        others = [row for row in rows if row[0] is not run]
        comparable, every = (_mean_tau(group_taus(others, comparable=c)) for c in (True, False))
        yield (
            f"other rows contradict {run.model} with {run.batch} samples in {run.seconds:.1f} s: the same plan with other "
            f"batches or once more makes it {seconds:.1f} s, and who predicts all that scores {possible_tau(rows):.2f}; "
            f"without this row tau is {comparable:.2f} on average, and {every:.2f} of all plans"
        )


def _mean_tau(taus: Sequence[tuple[str, int, int, float]]) -> float:
    return statistics.mean(value for *_, value in taus)


def _wrong_pairs(rows: Sequence[Row]) -> Table:
    """Pairs of plans in the wrong order, the worst first."""
    table = Table(
        title="plans in the wrong order: how much slower the second is, as published and as predicted, and where"
    )
    for heading in ("group", "published faster", "published slower", "lanes", "published", "predicted"):
        table.add_column(heading, justify="right" if heading in ("published", "predicted") else "left")
    wrong = [pair for pair in pairs_of(rows) if pair.predicted <= 0]
    for pair in sorted(wrong, key=lambda pair: pair.predicted - pair.published):
        names = pair.differs.split(", ")
        plans = (
            " ".join(f"{name} {value}" for name, value in plan.settings if name in names)
            for plan in (pair.faster, pair.slower)
        )
        longer = {
            name: (pair.slower.lanes[name] - there) / pair.faster.predicted for name, there in pair.faster.lanes.items()
        }
        lanes = ", ".join(f"{name} {part:+.1%}" for name, part in longer.items() if abs(part) > 0.0005)
        table.add_row(pair.group, *plans, lanes, f"{pair.published:+.1%}", f"{pair.predicted:+.1%}")
    return table


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


def _mfu(run: Run, seconds: float | None) -> float:
    assert seconds is not None
    dtype = {"float8": "float8_e4m3fn", "float4": "float4_e2m1fn"}.get(run.dtype, run.dtype)
    return run.flops / run.devices / seconds / model_of(run).device.product_flops_per_second([dtype])


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
