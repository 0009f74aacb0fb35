"""Sweeps in pieces: a cell that was right is not run again, one that was wrong is, and parts together are the whole."""

import argparse

import pytest

from tests.cells import Judged, add_arguments, run_cells

CELLS = [(model, mesh) for model in "abc" for mesh in ("8", "2x4")]


@pytest.fixture
def sweep(tmp_path):
    """`sweep(wrong, *arguments)`: the exit status, and the cells that were run; these of them are found wrong."""

    def run(wrong, *arguments):
        parser, ran = argparse.ArgumentParser(), []
        add_arguments(parser)

        def judge(cell):
            ran.append(cell)
            return Judged(cell not in wrong, "as told")

        chosen = parser.parse_args(["--record", str(tmp_path / "record.jsonl"), *arguments])
        return run_cells(CELLS, judge, chosen, "tests.test_cells"), ran

    return run


def test_it_goes_on(sweep, capsys):
    assert sweep(CELLS[1:2], "--seconds", "0") == (0, [])
    assert sweep(CELLS[1:2]) == (1, CELLS)
    assert "6 of 6 cells, 1 failures\n    a 2x4" in capsys.readouterr().out
    assert sweep([]) == (0, CELLS[1:2])
    assert sweep(CELLS) == (0, []), "nothing is left"


def test_parts_are_the_whole(sweep):
    first, second = (sweep([], "--part", part)[1] for part in ("1/2", "2/2"))
    assert {model for model, _ in first} == {"a", "c"} and {model for model, _ in second} == {"b"}
    assert sorted(first + second) == sorted(CELLS)
