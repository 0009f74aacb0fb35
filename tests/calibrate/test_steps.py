"""Measured steps: results are those of one step, every lane of the plan is there, and where they part is told."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import autopar
from autopar.calibrate.steps import whole_steps
from autopar.errors import AutoparError
from autopar.ir.trace.state import Roles
from autopar.report.measured import Lane, MeasuredStep
from tests.small_mlp import make_batch, make_params, train_step
from tests.sweep import QUICK, SLOW


def compiled_by(method, num_layers=4, width=16):
    cluster = autopar.Cluster.local(device=SLOW, intra=QUICK)
    params, batch = make_params(num_layers, width), make_batch(16, width)
    return autopar.parallelize(train_step, cluster=cluster, method=method).compile(params, batch), params, batch


@pytest.mark.parametrize(
    "method",
    [autopar.DataParallel(zero=3), autopar.PipelineParallel(num_stages=2, num_microbatches=2)],
    ids=["one mesh", "two stages"],
)
def test_one_step_is_taken(method):
    """However many are timed: the state that comes back is one step on, and can be stepped again."""
    compiled, params, batch = compiled_by(method)
    state, loss = compiled(params, batch)
    expected, expected_loss = jax.jit(train_step)(*jax.jit(train_step)(params, batch)[:1], batch)
    (state, loss), measured = compiled.measure(state, batch, steps=2)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for found, wanted in zip(state, expected, strict=True):
        np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-5, atol=1e-6)
    compiled(state, batch)
    assert measured.num_steps == 2 and measured.step_seconds > 0
    assert measured.lanes[0] == Lane("step", 1, compiled.plan.cost.step_seconds, measured.step_seconds)


@pytest.mark.parametrize("is_returned", [True, False])
def test_steps_follow_one_another(is_returned):
    """As in training, each on what the last returned; where that is not among the results, each on a copy. The user's stays."""
    seen = []

    def run(given):
        seen.append([float(x) for x in given])
        given[0].delete()
        return {"loss": given[0].dtype.type(1), "state": jax.numpy.float32(len(seen))}

    state, batch = jax.numpy.float32(0), jax.numpy.float32(7)
    roles = Roles({1: 0} if is_returned else {}, (0,), (1,), (True, False), {})
    assert whole_steps(run, [state, batch], roles, steps=3) > 0
    assert not state.is_deleted()
    assert seen == ([[k, 7] for k in range(5)] if is_returned else [[0, 7]] * 4)


def test_lanes_of_one_program(tmp_path):
    compiled, params, batch = compiled_by(autopar.DataParallel(zero=3))
    _, measured = compiled.measure(params, batch, steps=1)
    cost = compiled.plan.cost
    kinds = dict.fromkeys(f"{c.kind} over {','.join(c.axes)}" for c in cost.collectives)
    assert [lane.name for lane in measured.lanes] == ["step", "kernels", *kinds]
    assert sum(lane.times for lane in measured.lanes[2:]) == sum(c.times for c in cost.collectives)
    assert sum(lane.predicted_seconds for lane in measured.lanes[2:]) == pytest.approx(cost.communication_seconds)
    assert all(lane.measured_seconds >= 0 for lane in measured.lanes)
    assert "all-gather over x" in str(measured) and "timed by themselves" in str(measured)
    assert not measured.events
    page = autopar.show(compiled.plan, measured, path=tmp_path / "page.html").read_text()
    for html in (page, measured._repr_html_()):
        assert html.count('class="k-B"') == html.count('class="k-F"') == len(measured.lanes), "two bars for each lane"
        assert all(lane.name in html for lane in measured.lanes)


def test_lanes_of_stages():
    compiled, params, batch = compiled_by(autopar.PipelineParallel(num_stages=2, num_microbatches=2))
    _, measured = compiled.measure(params, batch, steps=1)
    names = [lane.name for lane in measured.lanes]
    assert set(compiled.programs) <= set(names) and "mesh 0 to mesh 1" in names and "mesh 1 to mesh 0" in names
    times = {lane.name: lane.times for lane in measured.lanes}
    assert times["stage0/F"] == 2 and times["stage0/U"] == 1
    planned = compiled.plan.timeline()
    assert {e.name for e in measured.events} == {e.name for e in planned.events}
    assert "stage1/B" in str(measured) and "mesh 0" in str(measured)


def test_where_they_part():
    compiled, params, batch = compiled_by(autopar.DataParallel())
    lanes = (Lane("step", 1, 1.0, 1.05), Lane("kernels", 1, 0.5, 0.8), Lane("all-reduce over x", 3, 0.5, 0.125))
    measured = MeasuredStep((), "train_step", 1.05, 3, lanes)
    text = compiled.plan.diff(measured)
    rows = [line.split("  ")[1] for line in text.splitlines() if " ms" in line and "  " in line]
    assert [name.strip() for name in rows if name.strip()][:2] == ["all-reduce over x", "kernels"]
    assert "0.62" in text and "4.00" in text and "-375 ms" in text
    assert compiled.plan.diff(MeasuredStep((), "train_step", 1.0, 1, lanes[:1])) == ""
    assert "differ" in compiled.plan.diff(compiled_by(autopar.DataParallel(zero=3))[0].plan)


@pytest.mark.parametrize("steps", [0, -1, 1.5, "two"])
def test_no_steps(steps):
    compiled, params, batch = compiled_by(autopar.DataParallel())
    with pytest.raises(AutoparError, match="`steps` must be a whole number, 1 or more"):
        compiled.measure(params, batch, steps=steps)
