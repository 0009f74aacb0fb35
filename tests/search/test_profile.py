"""What pictures show adds up to what the plan says."""

from __future__ import annotations

import itertools

import pytest

from autopar import DataParallel, PipelineParallel
from autopar.report.pictures.time import time_bars
from tests.intra_op import test_heap


@pytest.fixture(scope="module", params=["one mesh", "data parallel", "1f1b", "zb-h1", "interleaved"])
def planned(request, make_step, types):
    if request.param == "one mesh":
        return make_step().plan(*types())
    if request.param == "data parallel":
        return make_step(DataParallel(num_microbatches=4)).plan(*types())
    method = PipelineParallel(num_stages=2, num_microbatches=4, schedule=request.param)
    return make_step(method).plan(*types())


def test_memory_is_that_of_the_plan(planned):
    for memory in planned.profile.memory:
        peak = planned.cost.peak_bytes[memory.mesh]
        assert max(size for _, size in memory.curve) == peak == sum(size for _, size in memory.peak)
        assert all(a <= b for (a, _), (b, _) in itertools.pairwise(memory.curve))
        names = [name for name, _ in memory.peak]
        assert len(set(names)) == len(names) and any(name.startswith("state/") for name in names)
    assert len(planned.profile.memory) == len({stage.submesh for stage in planned.stages})


def test_gaps_are_lost_at_all_moments():
    plan = test_heap.plan()
    liveness = plan.attached.pipeline.stages[0].sharded.liveness
    gaps = plan.cost.peak_bytes[0] - liveness.peak_bytes
    levels = [size for _, size in plan.profile.memory[0].curve]
    assert gaps > 0 and set(levels) == {size + gaps for size in liveness.curve}


def test_time_is_that_of_the_plan(planned):
    bars = time_bars(planned)
    for bar in bars:
        assert sum(bar.seconds.values()) == pytest.approx(planned.cost.step_seconds, rel=1e-4)
    compute = [sum(bar.seconds.get(kind, 0.0) for kind in ("init", "F", "B", "W", "U")) for bar in bars]
    assert sum(compute) / len(compute) == pytest.approx(planned.cost.compute_seconds, rel=1e-4), "stages are equal"
    kinds = {work.kind for work in planned.profile.work}
    assert {"F", "B", "U"} <= kinds and ("W" in kinds) == (planned.schedule == "zb-h1")


def test_backward_takes_about_twice_as_long_as_forward(planned):
    seconds = dict.fromkeys("FBWU", 0.0)
    for work in planned.profile.work:
        seconds[work.kind if work.kind in seconds else "U"] += work.seconds
    assert 1.2 < (seconds["B"] + seconds["W"]) / seconds["F"] < 2.5


def test_what_crosses_is_what_is_sent(planned):
    transfers = [e for e in planned.events.events if e.kind == "transfer"]
    assert sum(c.messages for c in planned.profile.crossings) == len(transfers)
    for c in planned.profile.crossings:
        ahead = c.source < c.target
        assert c.bytes > 0 and (c.kind == "update" or (c.kind == "forward") == ahead)
