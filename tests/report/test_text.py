"""The page of a plan: as a whole, and what is said once of what repeats."""

from __future__ import annotations

import dataclasses
import re

import jax
import pytest

from autopar import Cluster
from autopar.plan.words import bytes_text, seconds_text
from autopar.report.page import Page, Table, page_of, solver_text
from autopar.report.paths import collapse_paths, numbers_text
from autopar.report.text import page_text
from autopar.streams.timeline import Event, Timeline


@pytest.mark.skipif(
    not jax.__version__.startswith("0.10"), reason="of equal plans another solver release takes another"
)
def test_golden(plan, golden):
    golden("plan_mlp", re.sub(r"(planning +).*", r"\1(masked)", str(plan)))


def test_no_line_is_wider_than_the_page(plan):
    assert all(len(line) <= 120 and line == line.rstrip() for line in str(plan).splitlines())


def test_a_path_too_long_for_the_page_breaks_between_its_names():
    names = [f"{'state' * 4}/{k * 8}/{k * 9}/kernel" for k in ("first", "other")]
    table = Table("Arguments", ("path", "type"), tuple((name, "float32[8,8]") for name in names))
    lines = [line.split()[0] for line in page_text(Page("Plan", (), (table,))).splitlines()[-4:]]
    assert "".join(lines) == "".join(names)
    assert all(line.endswith("/") or line.endswith("kernel") for line in lines)


def test_every_argument_is_on_the_page(plan):
    arguments = page_of(plan).tables[0]
    assert sum(int(row[4]) for row in arguments.rows) == sum(v.role != "activation" for v in plan.values)


def test_collectives_add_up(plan):
    rows = page_of(plan).tables[2].rows
    assert sum(int(row[2]) for row in rows) == sum(c.times for c in plan.cost.collectives)


def test_long_tables_show_their_largest_rows(plan):
    value = next(v for v in plan.values if v.role == "state")
    many = tuple(dataclasses.replace(value, name=f"state/{'abcdefg'[k % 7]}{'x' * k}") for k in range(60))
    table = page_of(dataclasses.replace(plan, values=many)).tables[0]
    assert len(table.rows) == 32 and table.note.startswith("and 28 smaller")


def test_html_is_escaped_and_whole(plan):
    html = dataclasses.replace(plan, name="<step>")._repr_html_()
    assert "&lt;step&gt;" in html and "<step>" not in html
    assert html.count("<table") == html.count("</table>") and "all-" in html
    assert not re.search("(src|href)=|@import|url\\(", html), "nothing is loaded from elsewhere"


def test_what_is_too_small_to_split_says_so(plan, make_step, types):
    tiny = make_step(cluster=Cluster.of("8 h100")).plan(*types(batch=8, num_layers=1))
    assert "this step is too small, all 8 devices compute the same" in str(tiny)
    assert "too small" not in str(plan)


def test_html_holds_the_timetable(plan):
    pipeline = dataclasses.replace(
        plan, schedule="gpipe", events=Timeline((Event("stage0/F", "F", 0, 3, 0, 0.0, 1.0),))
    )
    assert "forward of microbatch 3" in pipeline._repr_html_() and "F3=" in str(pipeline)


@pytest.mark.parametrize(
    "paths, merged",
    [
        (["a/0/w", "a/1/w", "a/2/w"], ["a/{0..2}/w"]),
        (["a/0/w", "b/1/w"], ["a/0/w", "b/1/w"]),
        (["Dense_0/w", "Dense_3/w", "Conv_1/w"], ["Dense_{0,3}/w", "Conv_1/w"]),
        (["m/0/l/0", "m/0/l/1", "m/1/l/0", "m/1/l/1"], ["m/{0,1}/l/{0,1}"]),
        (["x", "y"], ["x", "y"]),
        (["l/01", "l/02"], ["l/01", "l/02"]),
    ],
)
def test_collapse_paths(paths, merged):
    found = collapse_paths([(path, "same") for path in paths])
    assert [path for path, _, _ in found] == merged
    assert sum(count for _, _, count in found) == len(paths)


def test_collapse_keeps_what_differs_apart():
    assert [p for p, _, _ in collapse_paths([("l/0", "a"), ("l/1", "b"), ("l/2", "a")])] == ["l/{0,2}", "l/1"]


def test_numbers():
    assert numbers_text([5, 1, 2, 3, 8, 9]) == "1..3,5,8,9"


@pytest.mark.parametrize(
    "number, text", [(0, "0 B"), (999, "999 B"), (1024, "1.02 kB"), (80e9, "80.0 GB"), (999_999, "1.00 MB")]
)
def test_bytes(number, text):
    assert bytes_text(number) == text


@pytest.mark.parametrize(
    "seconds, text", [(0, "0 s"), (1e-6, "1.00 us"), (0.0123, "12.3 ms"), (61, "61.0 s"), (-2e-3, "-2.00 ms")]
)
def test_seconds(seconds, text):
    assert seconds_text(seconds) == text


def test_the_solver_is_quoted_honestly():
    assert "optimal" in solver_text("optimal", 0.0)
    assert solver_text("feasible", 0.031) == "feasible: at most 3.10% above the cheapest on this mesh"
    assert "no bound" in solver_text("feasible", float("inf"))
