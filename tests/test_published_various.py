"""The third table: frameworks, devices and models of which the first two have nothing, and to which nothing is fitted."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "benchmarks")]

from published import predicted  # noqa: E402
from published_runs import DATA, Left, read_runs  # noqa: E402

VARIOUS = DATA.with_name("various_runs.tsv")


@pytest.fixture(scope="module")
def runs():
    return read_runs(VARIOUS)[0]


def test_every_row_says_where_it_is_from_and_is_read(runs):
    left = read_runs(VARIOUS)[1]
    assert len(runs) + len(left) == 172 and len(left) <= 1
    assert len({run.source for run in runs}) == 16
    assert {run.source for run in read_runs(DATA)[0]}.isdisjoint(run.source for run in runs)


@pytest.mark.parametrize("source", ["InternLM", "TPUs", "fms-fsdp", "TinyLlama"])
def test_seconds_of_frameworks_that_nothing_is_fitted_to(runs, source):
    run = next(run for run in runs if source in run.source)
    row = predicted(run)
    assert not isinstance(row, Left), row
    assert 0.75 < row[1].seconds / run.seconds < 1.25, run
