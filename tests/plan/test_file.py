"""Plan files: what is saved comes back, runs, and explains; damage and staleness are told."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from autopar import Cluster, Device, Link, Plan
from autopar.errors import PlanFileError, StalePlanError


@pytest.fixture
def file(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def edited(file, change):
    record = json.loads(file.read_text())
    change(record)
    file.write_text(json.dumps(record))
    return file


def test_comes_back_and_prints_the_same(plan, file):
    loaded = Plan.load(file)
    assert str(loaded) == str(plan) and loaded.diff(plan) == "" and loaded._repr_html_() == plan._repr_html_()
    assert (
        loaded.cost == plan.cost
        and loaded.stages[0].choices == plan.stages[0].choices
        and loaded.streams == plan.streams
    )
    assert list(file.parent.iterdir()) == [file], "nothing is left beside it"


def test_attached_it_is_the_plan_again(plan, file, make_step, types):
    attached = make_step().attach(*types(), plan=Plan.load(file))
    assert attached == plan
    assert jax.tree.structure(attached.shardings) == jax.tree.structure(plan.shardings)


def test_files_of_before_the_memory_of_hosts_was_counted(plan, file):
    edited(file, lambda record: record["cost"].pop("host_bytes"))
    assert Plan.load(file).cost == plan.cost


def test_infinite_numbers(plan, tmp_path):
    unbounded = dataclasses.replace(plan, budget_bytes=math.inf)
    unbounded.save(tmp_path / "p")
    assert Plan.load(tmp_path / "p").budget_bytes == math.inf
    assert "Infinity" not in (tmp_path / "p").read_text()


def test_a_loaded_plan_runs(file, make_step, types):
    step = make_step()
    state, batch = jax.tree.map(lambda t: np.random.RandomState(0).randn(*t.shape).astype(t.dtype) / 8, types())
    compiled = step.compile(*types(), plan=Plan.load(file))
    expected = jax.jit(step.__wrapped__)(state, batch)
    for a, b in zip(jax.tree.leaves(compiled(state, batch)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "text, wrong",
    [
        ("", "not whole JSON"),
        ('{"format": "autopar plan", "version": 2,', "not whole JSON"),
        ("[1, 2]", "no autopar plan"),
        ('{"version": 2}', "no autopar plan"),
        ('{"format": "autopar plan", "version": 99}', "version 99; this autopar reads version 8"),
        ('{"format": "autopar plan", "version": 8}', '"stages" is missing'),
        ("\x00\x01", "not whole JSON"),
    ],
)
def test_not_a_plan(tmp_path, text, wrong):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanFileError, match=wrong) as caught:
        Plan.load(path)
    assert caught.value.path == str(path) and "plan again" in str(caught.value)


def test_no_file(tmp_path):
    with pytest.raises(PlanFileError, match="No such file"):
        Plan.load(tmp_path / "absent.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(PlanFileError, match="not text"):
        Plan.load(tmp_path / "binary")
    with pytest.raises(PlanFileError):
        Plan.load(tmp_path)


def test_cannot_be_saved(plan, tmp_path):
    with pytest.raises(PlanFileError, match="cannot be written"):
        plan.save(tmp_path / "absent" / "plan.json")


def test_a_pipe_is_written_into(plan, tmp_path):
    """And not put aside for a file of its name, as `/dev/stdout` would be."""
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor() as threads:
        text = threads.submit((tmp_path / "pipe").read_text)
        plan.save(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo() and json.loads(text.result())["name"] == plan.name


@pytest.mark.parametrize(
    "change, wrong",
    [
        (lambda r: r["stages"][0].update(choices="x"), r'"stages\[0\].choices" is "x", not a list'),
        (lambda r: r["stages"][0]["choices"].__setitem__(3, -1), r'"stages\[0\].choices\[3\]" is -1'),
        (lambda r: r["stages"][0]["choices"].__setitem__(0, 1.5), r'"stages\[0\].choices\[0\]" is 1.5'),
        (lambda r: r.pop("cost"), '"cost" is missing'),
        (lambda r: r["cost"].pop("peak_bytes"), '"cost.peak_bytes" is missing'),
        (lambda r: r["cost"].update(step_seconds=None), '"cost.step_seconds" is null, not a number'),
        (lambda r: r["cost"].update(peak_bytes=[]), "a list of"),
        (lambda r: r.update(stages=[]), "list of stages"),
        (lambda r: r["stages"][0].update(shape=[2, 2]), "num_devices"),
        (lambda r: r["stages"][0].update(axis_names=["x", "x"]), "mesh"),
        (lambda r: r["stages"][0].update(links=[[1, 2]]), "a list of 2"),
        (lambda r: r["values"][0].update(dtype="float33"), "element type"),
        (lambda r: r["values"][0].update(role="king"), "one of state"),
        (lambda r: r["values"][0].update(dims=[["q"]]), "one of x, y"),
        (lambda r: r["values"][0].update(shape=[31], dims=[["x"]]), "way to split"),
        (lambda r: r["values"].__setitem__(0, 7), "7, not an object"),
        (lambda r: r["collectives"].append({}), "is missing"),
        (lambda r: r.update(fingerprints=[]), "not an object"),
        (lambda r: r.update(name=3), '"name" is 3, not text'),
    ],
)
def test_damage_names_the_entry(file, change, wrong):
    with pytest.raises(PlanFileError, match=wrong):
        Plan.load(edited(file, change))


def test_every_entry_is_checked(file):
    """Whatever entry is lost or of another type: our error or none, never a surprise."""
    original = json.loads(file.read_text())
    for key in original:
        for value in (None, [], {}, "x", -1, [[]], [None]):
            record = dict(original)
            record[key] = value
            file.write_text(json.dumps(record))
            try:
                str(Plan.load(file))
            except PlanFileError:
                continue


@pytest.mark.parametrize(
    "change, wrong",
    [
        (lambda r: r["stages"][0]["choices"].pop(), "choices for"),
        (lambda r: r["stages"][0]["choices"].__setitem__(0, 10**6), "out of range"),
        (
            lambda r: r["stages"][0]["choices"].__setitem__(0, (r["stages"][0]["choices"][0] + 1) % 2),
            "edited|fit no program",
        ),
        (lambda r: (r["collectives"].pop(), r["cost"]["exposed_seconds"].pop()), "other collectives"),
    ],
)
def test_choices_of_another_program(file, make_step, types, change, wrong):
    with pytest.raises(PlanFileError, match=wrong):
        make_step().attach(*types(), plan=Plan.load(edited(file, change)))


def test_stale_arguments(file, make_step, types):
    with pytest.raises(StalePlanError, match="stale") as caught:
        make_step().compile(*types(batch=128), plan=Plan.load(file))
    assert caught.value.changed == tuple(f"batch/{k}: float32[256,32] in the plan, float32[128,32] now" for k in "xy")
    with pytest.raises(StalePlanError, match="no argument now"):
        make_step().compile(*types(num_layers=3), plan=Plan.load(file))
    with pytest.raises(StalePlanError, match="not in the plan"):
        make_step().compile(*types(num_layers=5), plan=Plan.load(file))


def test_stale_code(file, make_step, types):
    def train_step(state, batch):
        new, loss = make_step().__wrapped__(state, batch)
        return new, 2 * loss

    with pytest.raises(StalePlanError, match="computes something else"):
        make_step(fn=train_step).attach(*types(), plan=Plan.load(file))


def test_stale_jax(file, make_step, types):
    loaded = Plan.load(edited(file, lambda r: r["fingerprints"].update(program="0", jax="0.1")))
    with pytest.raises(StalePlanError, match=f"planned with JAX 0.1, this is JAX {jax.__version__}"):
        make_step().attach(*types(), plan=loaded)


def test_stale_cluster(file, make_step, types):
    four = Cluster(
        hosts=1, devices_per_host=4, device=Device("toy", 40e6, 1e6, 1e9), intra=Link(1e-6, 1e6), inter=Link(1e-6, 1e6)
    )
    with pytest.raises(StalePlanError, match="planned for 8 devices.*; this is 4 devices"):
        make_step(cluster=four).attach(*types(), plan=Plan.load(file))
    slower = Cluster(
        hosts=1, devices_per_host=8, device=Device("toy", 40e6, 1e6, 1e9), intra=Link(1e-6, 1e5), inter=Link(1e-6, 1e6)
    )
    with pytest.raises(StalePlanError, match="links or rates"):
        make_step(cluster=slower).attach(*types(), plan=Plan.load(file))
