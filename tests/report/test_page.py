"""What limits a pipeline, of events written by hand; and how the page says it."""

from __future__ import annotations

import dataclasses

from autopar import PipelineParallel
from autopar.report.page import find_limit
from autopar.streams.timeline import Event


def run(kind, mesh, start, end):
    return Event(f"stage{mesh}/{kind}", kind, mesh, 0, mesh, start, end)


def test_the_busiest_mesh():
    events = [
        run("U", 1, 0.0, 1.0),  # what precedes the microbatches
        run("F", 0, 0.0, 2.0),
        Event("to mesh 1", "transfer", 0, 0, 0, 2.0, 3.0),
        run("F", 1, 3.0, 6.0),
        run("B", 1, 7.0, 11.0),
        run("B", 0, 11.0, 13.0),
        run("U", 0, 13.0, 14.0),
        run("U", 1, 11.0, 11.5),
    ]
    limit = find_limit(events)
    assert (limit.mesh, limit.stages, limit.busy_seconds, limit.transfer_seconds) == (1, (1,), 8.5, 1.0)
    assert (limit.fill_seconds, limit.gap_seconds, limit.drain_seconds) == (2.0, 1.0, 2.5)
    assert find_limit([]) is None


def test_the_parts_add_up_to_the_step(make_step, types):
    plan = make_step(PipelineParallel(num_stages=4, num_microbatches=4)).plan(*types(batch=32))
    limit = find_limit(plan.events.events)
    parts = limit.busy_seconds + limit.fill_seconds + limit.gap_seconds + limit.drain_seconds
    assert abs(parts - plan.cost.step_seconds) < 1e-9
    assert f"limited by     stage {limit.mesh}, busy for" in str(plan)


def test_what_else_was_tried(make_step, types):
    plan = make_step(PipelineParallel(num_stages=4, num_microbatches=4)).plan(*types(batch=32))
    step = plan.cost.step_seconds
    chosen = "4 stages on 2+2+2+2, 4 microbatches, 1f1b"
    tried = (("(x=8)", f"{2 * step:.3e} s"), ("(x=2, y=4)", "it does not fit."), (chosen, f"{step:.6e} s"))
    text = str(dataclasses.replace(plan, alternatives=(*tried, ("(x=8)", f"{3 * step:.3e} s"))))
    assert "(+100.0%)" in text and "(+200.0%)" not in text and "(x=2, y=4): it does not fit." in text
    assert f"{chosen}: " not in text
