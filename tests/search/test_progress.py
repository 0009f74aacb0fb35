"""What planning shows while somebody waits, and how Ctrl-C ends it."""

from __future__ import annotations

import io
import itertools
import math
import sys
import threading
import traceback

import pytest

from autopar import Auto, Cluster, PipelineParallel
from autopar.intra_op import instance
from autopar.search import progress
from autopar.search.planner import make_plan
from autopar.search.progress import Standing, part_of, planning_progress


def test_ctrl_c_leaves_no_solver_behind(make_step, types, monkeypatch):
    step = make_step()

    def interrupted(*args, **settings):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(instance, "solve", interrupted)
        patched.setattr(instance, "solve_constrained", interrupted)
        with pytest.raises(KeyboardInterrupt, match="planning `train_step` was stopped") as caught:
            step.plan(*types(num_layers=1))
    shown = "".join(traceback.format_exception(caught.value))
    assert "intra_op" not in shown and "During handling" not in shown
    assert step.plan(*types(num_layers=1)).cost.step_seconds > 0, "it can be planned afterwards"


def test_how_far_it_is_in_words():
    clock = iter([0.0, 10.0, 10.0, 20.0, 20.0])
    standing = Standing("train_step", now=lambda: next(clock))
    standing.report("sharding on mesh (x=8)", 0.25)
    assert str(standing) == "25%, 10 s, about 30 s left: sharding on mesh (x=8)"
    standing.report("planning 4 stages", None, 0.0125, 0.0031)
    assert str(standing) == "25%, 20 s, about 60 s left, best step 12.5 ms, gap 0.31%: planning 4 stages"


def test_it_never_goes_back():
    standing = Standing("train_step")
    half = part_of(standing.report, 0.5, 1.0)
    half("a", 0.5, 2.0, 0.1)
    assert (standing.done, standing.best, standing.gap) == (0.75, 2.0, 0.1)
    half("b", 0.1, 3.0, 0.0)
    half("c", 0.1, 2.0)
    assert (standing.done, standing.best, standing.gap) == (0.75, 2.0, 0.1), "that of the best"


@pytest.mark.parametrize("method", [Auto(), PipelineParallel(num_stages=4, num_microbatches=2)], ids=["auto", "stages"])
def test_the_planner_tells_how_far_it_is(make_step, types, method):
    step = make_step(method, Cluster.of("2x2 h100"))
    program, roles = step._roles(types(num_layers=2, batch=64), {})
    told, standing = [], Standing("train_step")

    def report(text, done=None, best=math.inf, gap=math.nan):
        told.append((done, best))
        standing.report(text, done, best, gap)

    make_plan(program, roles, step.cluster, method, report)
    done = [share for share, _ in told if share is not None]
    assert len(set(done)) > 3 and done[0] == 0 and max(done) <= 1
    assert all(a <= b for a, b in itertools.pairwise(done))
    assert isinstance(method, PipelineParallel) or math.isfinite(told[-1][1]), "the best step so far"
    assert isinstance(method, PipelineParallel) or math.isfinite(standing.gap), "and how far it may be from optimal"


def test_lines_where_there_is_no_terminal(monkeypatch):
    told = threading.Event()

    class Log(io.StringIO):
        def write(self, text):
            told.set()
            return super().write(text)

    monkeypatch.setattr(progress, "LINE_SECONDS", 0.01)
    monkeypatch.setattr(sys, "stderr", log := Log())
    with planning_progress("train_step") as report:
        report("sharding on mesh (x=8)", 0.5)
        told.clear()
        assert told.wait(60)
    assert "planning train_step: 50%, " in log.getvalue() and "left: sharding on mesh (x=8)" in log.getvalue()
    assert "planning progress" not in [thread.name for thread in threading.enumerate()]
