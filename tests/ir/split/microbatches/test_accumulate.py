"""Steps in microbatches on 8 devices: equal to `jax.jit`, reduced once, planned and refused as said."""

from __future__ import annotations

import pytest

import autopar
from autopar import DataParallel, Plan, ShardParallel
from autopar.errors import AutoparError, BatchError, MicrobatchError
from tests.ir.split.cases import HERE, Case, Tree, assert_same, batch_of, full_batch, mlp_params, sgd
from tests.ir.split.losses import LOSSES, batch_norm_loss

LARGE = Case(sgd(LOSSES["masked mean"]), batch=lambda: batch_of(32))


def parallel(method: autopar.search.methods.Method) -> tuple[autopar.ParallelStep, Tree, Tree]:
    return autopar.parallelize(LARGE.step, method=method), LARGE.state(), LARGE.batch()


@pytest.mark.parametrize(
    "method",
    [DataParallel(num_microbatches=4), DataParallel(zero=3, num_microbatches=2), ShardParallel(num_microbatches=4)],
    ids=["zero0", "zero3", "shard"],
)
def test_parallel_equals_jit(method):
    step, state, batch = parallel(method)
    plan = step.plan(state, batch)
    assert plan.num_microbatches == method.num_microbatches and plan.microbatch_semantics == "exact"
    assert_same(step(state, batch), full_batch(LARGE))


def test_gradients_are_reduced_once():
    step, state, batch = parallel(DataParallel(num_microbatches=4))
    collectives = step.plan(state, batch).cost.collectives
    gradients = [c for c in collectives if c.bytes >= sum(p.nbytes for p in mlp_params().values())]
    assert [(c.kind, c.times) for c in gradients if c.kind != "all-gather"] == [("all-reduce", 1)]
    assert not [c for c in collectives if c.times == 4]


def test_nothing_is_communicated_in_the_loop():
    step, state, batch = parallel(DataParallel(num_microbatches=4))
    assert {c.times for c in step.plan(state, batch).cost.collectives} == {1}


def test_plan_is_saved_and_loaded(tmp_path):
    step, state, batch = parallel(DataParallel(num_microbatches=4))
    plan = step.plan(state, batch)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert (loaded.num_microbatches, loaded.microbatch_semantics) == (4, "exact")
    assert loaded.cost.collectives == plan.cost.collectives
    assert loaded.stages[0].choices == plan.stages[0].choices
    fresh = autopar.parallelize(LARGE.step, method=DataParallel(num_microbatches=4))
    assert_same(fresh.compile(state, batch, plan=loaded)(state, batch), full_batch(LARGE))


def test_batch_that_does_not_divide_is_named():
    step, state, batch = parallel(DataParallel(num_microbatches=5))
    with pytest.raises(BatchError, match="(?s)batch of 32 samples, num_microbatches=5.*32 is no multiple of 5"):
        step.plan(state, batch)


def test_refused_step_is_not_planned():
    step = autopar.parallelize(sgd(batch_norm_loss), method=DataParallel(num_microbatches=4))
    with pytest.raises(MicrobatchError, match=HERE):
        step.plan(LARGE.state(), LARGE.batch())


@pytest.mark.parametrize("method", [DataParallel, ShardParallel])
@pytest.mark.parametrize("count", [0, -1, 2.5, "4", True, None])
def test_number_that_is_none(method, count):
    with pytest.raises(AutoparError, match=rf"(?s)num_microbatches.*{method.__name__}\(num_microbatches={count!r}\)"):
        method(num_microbatches=count)


@pytest.mark.parametrize("method", [DataParallel, ShardParallel])
def test_unknown_semantics(method):
    with pytest.raises(AutoparError, match="(?s)semantics.*'fast'.*'exact', 'per_microbatch'"):
        method(num_microbatches=4, microbatch_semantics="fast")
