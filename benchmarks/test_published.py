"""Predicted against published step times; `published.py` prints the details."""

from __future__ import annotations

import statistics

from published_runs import DATA, read_runs
from published_steps import predict

MOST_MEDIAN_ERROR = 0.08


def test_published_runs(benchmark, size):
    """The small set takes every eighth run."""
    runs = [run for run in read_runs(DATA)[0] if run.seconds and not run.unstated][:: 1 if size == "full" else 8]

    def errors():
        return [abs(predict(run).seconds / run.seconds - 1) for run in runs]

    benchmark.group = "published runs"
    found = benchmark.pedantic(errors, rounds=1)
    median, within = statistics.median(found), sum(error < 0.3 for error in found) / len(found)
    benchmark.extra_info.update(runs=len(found), median_error=median, within_30_percent=within)
    assert median < MOST_MEDIAN_ERROR and within > 0.9
