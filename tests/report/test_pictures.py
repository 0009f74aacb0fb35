"""Pictures, read as text: what they count, name and colour."""

from __future__ import annotations

import re

import pytest

import autopar
from autopar import LogicalMesh, PipelineParallel
from autopar.errors import AutoparError
from autopar.markup import ticks
from autopar.mesh import Sharding
from autopar.report.pictures.model import parameter_root
from autopar.report.pictures.tensors import device_grid
from autopar.report.pictures.timetable import timetable_picture
from autopar.streams.timeline import Event

MESH = LogicalMesh((2, 4))


@pytest.mark.parametrize(
    "sharding, colours",
    [
        (Sharding((("x", "y"), ())), 8),
        (Sharding((("y",), ("x",))), 8),
        (Sharding(((), ("y",))), 4),
        (Sharding((("x",), ())), 2),
        (Sharding(((), ())), 1),
    ],
)
def test_devices_that_hold_the_same_have_one_colour(sharding, colours):
    grid = device_grid((8, 8), sharding, MESH)
    found = re.findall(r'class="(p\d+|whole)"', grid)
    assert len(found) == 8 and len(set(found)) == colours


def test_a_cell_says_what_its_device_holds():
    grid = device_grid((8, 8), Sharding((("x",), ("y",)), ()), MESH)
    assert "device 0: [0:4, 0:2]" in grid and "device 7: [4:8, 6:8]" in grid
    assert "device 0: [:, :], a part of the sum" in device_grid((8, 8), Sharding(((), ()), ("x",)), MESH)


def test_a_large_mesh_is_told_in_words():
    assert "<svg" not in device_grid((4096,), Sharding((("x",),)), LogicalMesh((1024,)))


LAYERS = [f"layers/{k}/{name}" for k in range(3) for name in ("kernel", "bias")]


@pytest.mark.parametrize(
    "paths, root",
    [
        ([f"state/{copy}/{path}" for copy in ("params", "momentum") for path in LAYERS], "state/params"),
        (
            [f"state/0/{path}" for path in LAYERS] + [f"state/1/0/{m}/{p}" for m in ("mu", "nu") for p in LAYERS],
            "state/0",
        ),
        ([f"params/{path}" for path in LAYERS], ""),
        (["state/w", "state/v"], ""),
        ([], ""),
    ],
)
def test_where_the_parameters_are(paths, root):
    assert parameter_root(paths) == root


def test_what_a_run_has_waited_for():
    events = (
        Event("stage0/F", "F", 0, 0, 0, 0.0, 1.0),
        Event("to mesh 1", "transfer", 0, 0, 0, 1.0, 1.5),
        Event("stage1/F", "F", 1, 0, 1, 1.5, 2.0),
        Event("stage1/B", "B", 1, 0, 1, 2.0, 3.0),
    )
    picture = timetable_picture(events, {0: "device 0", 1: "device 1"})
    assert "waited 1.50 s for mesh 0" in picture and picture.count("waited") == 1
    assert "sending to mesh 1, 500 ms" in picture


def test_ticks_are_round():
    assert [*ticks(1.0)] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert [*ticks(0.0)] == [] == [*ticks(float("inf"))]


def test_show_writes_a_page(plan, make_step, types, tmp_path):
    pipeline = make_step(PipelineParallel(num_stages=2, num_microbatches=2)).plan(*types())
    for other, title in ((None, "Plan of `train_step`"), (plan, "Two plans of"), (pipeline.timeline(), "measured: ")):
        written = autopar.show(pipeline, other, path=tmp_path / "page.html")
        assert written == tmp_path / "page.html" and title in written.read_text(encoding="utf-8")


def test_show_opens_the_browser(plan, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    written = autopar.show(plan)
    assert opened == [written.as_uri()] and "</html>" in written.read_text(encoding="utf-8")
    written.unlink()


@pytest.mark.parametrize("arguments", [(7,), ("plan.json",)])
def test_only_plans_are_shown(plan, arguments):
    with pytest.raises(AutoparError, match="only plans can be shown"):
        autopar.show(*arguments)
    with pytest.raises(AutoparError, match="only plans can be shown"):
        autopar.show(plan, *arguments)


def test_show_says_where_it_cannot_write(plan, tmp_path):
    with pytest.raises(AutoparError, match="cannot be written"):
        autopar.show(plan, path=tmp_path / "absent" / "page.html")
