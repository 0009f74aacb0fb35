"""Recomputation as a planned choice: only where memory demands it, only as much, seen, fixed, saved, and kept to."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import autopar
from autopar import PipelineParallel
from autopar.errors import AutoparError, InfeasibleError, PipelineError
from autopar.inter_op.cut import cut_step
from autopar.inter_op.stage_plan import peak_bytes_here, plan_stage, resting_bytes
from autopar.report.page import page_of
from autopar.search import solve_stages
from autopar.search.pipeline import SlowerError, _Room
from autopar.search.progress import silent
from autopar.search.request import Request
from autopar.search.solve_stages import Solved, Terms
from autopar.search.stage_planner import _best_in_memory
from tests.live_bytes import most_live_bytes
from tests.small_transformer import arguments, train_step
from tests.sweep import QUICK, SLOW

NUM_STAGES, NUM_LAYERS, COUNT = 4, 4, 8
ARGUMENTS = {kind: arguments(kind, NUM_LAYERS, batch=32) for kind in ("unrolled", "scan")}
LEVELS = {"cheap": 0.0, "all": math.inf}


def make_step(num_stages=NUM_STAGES, cluster=None, **method):
    cluster = cluster or autopar.Cluster(1, num_stages, SLOW, QUICK)
    method = PipelineParallel(num_stages=num_stages, num_microbatches=COUNT, offload="never", **method)
    return autopar.parallelize(train_step, cluster=cluster, method=method, batch_argnums=(1,))


@functools.cache
def planned(kind, schedule="1f1b", recompute="auto", budget=None):
    step = make_step(schedule=schedule, recompute=recompute, memory_budget_bytes=budget)
    return step.plan(*ARGUMENTS[kind])


def levels(plan):
    return tuple(stage.recomputed.level for stage in plan.stages)


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_without_need_nothing_heavy_runs_again(kind):
    plan, plenty = planned(kind), planned(kind, budget=10**9)
    assert levels(plan) == levels(plenty) == (0.0,) * NUM_STAGES
    assert plan.cost.step_seconds == plenty.cost.step_seconds and plan.streams == plenty.streams
    assert plan.stages == planned(kind, recompute="cheap").stages
    assert not any(stage.recomputed.operations or stage.recomputed.seconds for stage in plan.stages)
    assert "recompute" not in str(plan) and all(stage.recomputed.kept_bytes > 0 for stage in plan.stages)


@pytest.mark.parametrize("kind, schedule", [("unrolled", "1f1b"), ("scan", "gpipe")])
def test_only_stages_that_do_not_fit_run_more_again(kind, schedule):
    """Under 1F1B the first holds the most microbatches; under GPipe all hold the same."""
    plenty = planned(kind, schedule)
    peaks = sorted(set(plenty.cost.peak_bytes))
    for budget in [peaks[-1] - 1, *((a + b) // 2 for a, b in zip(peaks, peaks[1:], strict=False))]:
        plan = planned(kind, schedule, budget=budget)
        assert max(plan.cost.peak_bytes) <= budget
        needs = [peak > budget for peak in plenty.cost.peak_bytes]
        assert [level > 0 for level in levels(plan)] == needs
        assert [stage.recomputed.seconds > 0 for stage in plan.stages] == needs
        assert plan.cost.step_seconds >= plenty.cost.step_seconds
        for stage, before in zip(plan.stages, plenty.stages, strict=True):
            kept = stage.recomputed.kept_bytes + stage.recomputed.saved_bytes
            assert kept == before.recomputed.kept_bytes
    if schedule == "1f1b":
        assert levels(planned(kind, budget=peaks[-1] - 1))[1:] == (0.0,) * (NUM_STAGES - 1)


def test_the_least_level_that_fits():
    """Less is kept at each lower budget, and never more run again than that needs."""
    first = planned("unrolled").cost.peak_bytes[0]
    seen = {}
    for part in (0.95, 0.85, 0.75, 0.67):
        plan = planned("unrolled", budget=int(part * first))
        seen[levels(plan)[0]] = plan.stages[0].recomputed
    assert len(seen) > 1 and list(seen) == sorted(seen)
    kept = [recomputed.kept_bytes for recomputed in seen.values()]
    operations = [recomputed.operations for recomputed in seen.values()]
    assert kept == sorted(kept, reverse=True) and operations == sorted(operations)


@pytest.mark.parametrize("recompute", ["auto", "all"])
def test_what_fits_in_no_way(recompute):
    budget = 100_000
    with pytest.raises(InfeasibleError, match="memory budget(.*\n)*.*alive") as caught:
        planned("unrolled", recompute=recompute, budget=budget)
    assert caught.value.needed_bytes > budget == caught.value.budget_bytes


def test_cheap_forbids_more():
    budget = max(planned("scan").cost.peak_bytes) - 1
    assert max(planned("scan", budget=budget).cost.peak_bytes) <= budget
    with pytest.raises(InfeasibleError, match="memory budget"):
        planned("scan", recompute="cheap", budget=budget)


@pytest.mark.parametrize("recompute", ["all", ("all", "cheap", 40.0, "cheap")])
def test_levels_can_be_fixed(recompute):
    plan = planned("unrolled", recompute=recompute)
    wanted = recompute if isinstance(recompute, tuple) else (recompute,) * NUM_STAGES
    assert levels(plan) == tuple(LEVELS.get(level, level) for level in wanted)


def test_what_the_planner_found_can_be_fixed():
    found = planned("unrolled", budget=int(0.7 * planned("unrolled").cost.peak_bytes[0]))
    fixed = planned("unrolled", recompute=levels(found))
    assert any(levels(found)) and fixed.stages == found.stages and fixed.streams == found.streams


def test_mistakes():
    with pytest.raises(AutoparError, match="unknown level(.*\n)*.*'most' is no level"):
        PipelineParallel(num_stages=2, recompute="most")
    with pytest.raises(AutoparError, match="unknown level"):
        autopar.ThreeD(recompute=("all", -1.0))
    with pytest.raises(AutoparError, match="before the stages are known"):
        autopar.Auto(recompute=("all", "cheap"))
    with pytest.raises(PipelineError, match="another number of stages") as caught:
        planned("unrolled", recompute=("all", "cheap"))
    assert caught.value.num_stages == NUM_STAGES


def test_the_page_tells():
    plan = planned("unrolled", recompute=("all", "cheap", 40.0, "cheap"))
    facts = dict(page_of(plan).facts)
    assert facts["recomputed"].startswith("recompute=('all', 'cheap', 40, 'cheap'); ")
    table = page_of(plan).tables[0]
    kept, again = table.columns.index("kept in flight"), table.columns.index("run again")
    assert [row[again] == "what is cheap" for row in table.rows] == [False, True, False, True]
    assert table.rows[0][kept].startswith("0 B, not ") and "operations" in table.rows[0][again]
    assert "recomputed" in plan.diff(planned("unrolled"))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_plan_file(tmp_path, schedule):
    """Nothing is lost, and the same programs come of it."""
    plan = planned("unrolled", schedule, ("all", "cheap", 40.0, "all"))
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded.stages == plan.stages and str(loaded) == str(plan)
    cluster = autopar.Cluster.local(jax.devices()[:NUM_STAGES], device=SLOW, intra=QUICK)
    step = make_step(cluster=cluster, schedule=schedule, recompute=("all", "cheap", 40.0, "all"))
    made = step.plan(*ARGUMENTS["unrolled"])
    made.save(tmp_path / "local.json")
    loaded = autopar.Plan.load(tmp_path / "local.json")
    again = make_step(cluster=cluster, schedule=schedule).compile(*ARGUMENTS["unrolled"], plan=loaded)
    assert again.plan == made and again.plan.origin.pipeline.tasks.levels == levels(made)


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_live_bytes_stay_below_the_predicted_peak(kind):
    """Bytes of live arrays per device, looked at after every instruction."""
    budget = int(0.7 * planned(kind).cost.peak_bytes[0])
    cluster = autopar.Cluster.local(jax.devices()[:NUM_STAGES], device=SLOW, intra=QUICK)
    compiled = make_step(cluster=cluster, memory_budget_bytes=budget).compile(*ARGUMENTS[kind])
    assert any(levels(compiled.plan)) and max(compiled.plan.cost.peak_bytes) <= budget
    most = most_live_bytes(compiled, [np.zeros(a.shape, a.dtype) for a in jax.tree.leaves(ARGUMENTS[kind])])
    numbers = COUNT * 4  # the numbers of the microbatches, which live on from step to step
    assert all(a <= b + numbers for a, b in zip(most, compiled.plan.cost.peak_bytes, strict=True))


def test_compilers_keep_what_runs_again_late():
    """Where layer inputs are kept the compiled backward pass holds one layer's values at a time, as predicted."""
    cluster = autopar.Cluster.local(jax.devices()[:1], device=SLOW, intra=QUICK)

    def compiled(recompute):
        method = PipelineParallel(num_stages=1, num_microbatches=1, recompute=recompute)
        step = autopar.parallelize(train_step, cluster=cluster, method=method, batch_argnums=(1,))
        made = step.compile(*arguments("unrolled", 8, batch=64))
        predicted = made.plan.origin.pipeline.streams.programs["stage0/B"].working_bytes
        return predicted, made.programs["stage0/B"].memory_analysis().temp_size_in_bytes

    of_layer, of_all = compiled(30.0), compiled("all")
    assert of_layer[0] < of_all[0] / 3
    assert of_layer[1] < of_all[1] / 2


def test_three_d_takes_part():
    def plan(**settings):
        method = autopar.ThreeD(data=2, pipeline=2, num_microbatches=4, **settings)
        cluster = autopar.Cluster(1, 4, SLOW, QUICK)
        return autopar.parallelize(train_step, cluster=cluster, method=method, batch_argnums=(1,)).plan(
            *ARGUMENTS["unrolled"]
        )

    peaks = plan().cost.peak_bytes
    fitting = plan(memory_budget_bytes=max(peaks) - 1)
    assert max(fitting.cost.peak_bytes) < max(peaks) and any(levels(fitting))


@pytest.mark.slow
def test_auto_runs_again_where_that_is_faster():
    """Under a tight budget stages that run more again are among what `Auto` compares."""
    cluster = autopar.Cluster(4, 1, SLOW, intra=QUICK, inter=autopar.Link(1e-5, 1e7))

    def plan(recompute, budget):
        method = autopar.Auto(memory_budget_bytes=budget, recompute=recompute, offload="never")
        step = autopar.parallelize(train_step, cluster=cluster, method=method, batch_argnums=(1,))
        return step.plan(*arguments("unrolled", 8, batch=16))

    budget = 450_000
    found = plan("auto", budget)
    assert max(found.cost.peak_bytes) <= budget
    with contextlib.suppress(InfeasibleError):
        assert found.cost.step_seconds <= plan("cheap", budget).cost.step_seconds * (1 + 1e-6)


def test_a_stage_that_fits_as_it_is_is_sharded_once(monkeypatch):
    """What is best with memory without end, and takes no more than there is, is not looked for again within it."""
    budget = max(planned("unrolled").cost.peak_bytes) - 1
    sharded = []
    monkeypatch.setattr(solve_stages, "plan_stage", lambda *a, **k: sharded.append(a[0]) or plan_stage(*a, **k))
    with pytest.raises(InfeasibleError):  # microbatches in flight do not fit
        make_step(memory_budget_bytes=budget, recompute="cheap").plan(*ARGUMENTS["unrolled"])
    assert sharded and len(sharded) == len(dict.fromkeys(map(id, sharded)))


@pytest.mark.parametrize("again, sharded", [(0, 2), (8, 3)])
def test_a_stage_whose_peak_holds_nothing_that_runs_again_is_sharded_once_within_memory(monkeypatch, again, sharded):
    """Not to count what may run again then changes nothing."""
    program, asked, budget = planned("unrolled").origin.pipeline.stages[0].program, [], 1000
    mesh = planned("unrolled").origin.pipeline.stages[0].mesh

    def plan_stage(*args):
        asked.append(args)
        return SimpleNamespace(sharded=SimpleNamespace(solution=SimpleNamespace(objective=float(len(asked)))))

    def peak_bytes_here(stage, all_again, in_flight):
        return budget + 1 if stage.sharded.solution.objective == 1 else budget - again * all_again

    monkeypatch.setattr(solve_stages, "plan_stage", plan_stage)
    monkeypatch.setattr(solve_stages, "peak_bytes_here", peak_bytes_here)
    monkeypatch.setattr(solve_stages, "take_over", lambda program, known, *rest: known)
    terms = Terms(autopar.Cluster(1, 1, SLOW, QUICK), PipelineParallel(num_stages=1).options(), Solved())
    for bytes_there, all_again in ((math.inf, False), (budget, False), (budget, True)):
        options = dataclasses.replace(terms.options, memory_budget_bytes=bytes_there)
        own = dataclasses.replace(terms, options=options, all_again=all_again)
        found = solve_stages.solve_stage(program, mesh, own, None, ())
    assert len(asked) == sharded == found.sharded.solution.objective


def test_layers_stay_in_loops_where_nothing_that_runs_again_can_win():
    step = make_step()
    program, roles = step._roles(ARGUMENTS["scan"], {})
    request = Request(program, roles, step.cluster, step._method)
    cut, tried = cut_step(program, roles, 1, COUNT), []

    def slower(cut, beat):
        tried.append(cut)
        raise SlowerError("left out", given="", wrong="", do="")

    with pytest.raises(SlowerError):
        _best_in_memory(request, cut, lambda parts: cut_step(program, roles, parts, COUNT), slower, silent, 1.0)
    assert tried == [cut]


@functools.cache
def interleaved():
    """Two stages on each of two meshes of two devices."""
    return make_step(2, autopar.Cluster(1, 4, SLOW, QUICK), schedule="interleaved").plan(*ARGUMENTS["scan"])


def test_stages_on_one_mesh_share_its_memory():
    """Where memory binds, each is sharded within what the other leaves of it with all its microbatches in flight."""
    pipeline, cluster = interleaved().origin.pipeline, interleaved().origin.cluster
    room = _Room(len(pipeline.stages))
    room.divide(pipeline)
    for number, other in enumerate((2, 3, 0, 1)):
        budget = pipeline.simulation.peak_bytes[number % 2]
        options = PipelineParallel(num_stages=2, memory_budget_bytes=budget).options()
        own = room.of(number, Terms(cluster, options, Solved()))
        assert own.in_flight == 4 - number
        assert 0 < own.options.memory_budget_bytes <= budget - resting_bytes(pipeline.stages[other], 4 - other)


def test_what_a_stage_keeps_is_there_for_each_microbatch_in_flight():
    stage = interleaved().origin.pipeline.stages[0]
    kept = sum(b.num_bytes for b in stage.task("B").inputs if b.var in stage.program.kept)
    assert peak_bytes_here(stage) < peak_bytes_here(stage, in_flight=4) <= peak_bytes_here(stage) + 3 * kept
    assert resting_bytes(stage, 4) - resting_bytes(stage, 1) == 3 * kept
