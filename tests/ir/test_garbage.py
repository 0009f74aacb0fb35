"""The collector rests while passes run, and leaves things as it found them."""

import contextlib
import gc

import pytest

import autopar
from autopar.errors import InfeasibleError
from autopar.ir.passes import without_collection
from tests.models.registry import CASES


@pytest.fixture(autouse=True)
def nothing_frozen():
    """As in a user's process: what this one has frozen is so again afterwards."""
    before = gc.get_freeze_count(), gc.isenabled()
    gc.unfreeze()
    gc.enable()
    yield
    if before[0]:
        gc.freeze()
    if not before[1]:
        gc.disable()


def test_what_was_made_meanwhile_is_old_afterwards():
    with without_collection():
        assert not gc.isenabled()
        before = gc.get_count()[0]
        kept = [[number] for number in range(20_000)]
        assert gc.get_count()[0] - before > 10_000
    assert gc.isenabled() and gc.get_freeze_count() == 0
    assert gc.get_count()[0] < 10_000 and len(kept) == 20_000


def test_what_somebody_else_has_frozen_stays_frozen():
    gc.freeze()
    frozen = gc.get_freeze_count()
    with without_collection():
        pass
    assert gc.get_freeze_count() == frozen > 0
    gc.unfreeze()


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    with without_collection():
        pass
    assert not gc.isenabled()


LOCAL = {"microbatch_semantics": "per_microbatch"}


@pytest.mark.parametrize(
    "name, method",
    [
        ("gpt_unrolled", autopar.Auto()),
        ("gpt_scan", autopar.PipelineParallel(num_stages=2, num_microbatches=2)),
        ("gpt_gradient_accumulation", autopar.ShardParallel(mesh_shape=(4,), num_microbatches=2)),
        ("two_towers", autopar.PipelineParallel(num_stages=2, num_microbatches=2)),
        ("resnet_batchnorm", autopar.ShardParallel(mesh_shape=(4,), num_microbatches=2, **LOCAL)),
        ("wide_resnet_plain", autopar.ThreeD(data=2, pipeline=2, num_microbatches=2, **LOCAL)),
        ("gpt_scan", autopar.ShardParallel(mesh_shape=(2, 2), memory_budget_bytes=100_000)),
    ],
)
def test_planning_leaves_no_cycles(name, method):
    """Nothing of a search waits for the collector, which rests: it would be a program in memory for each plan."""
    case = CASES[name]()
    step = autopar.parallelize(case.step, method=method, cluster=autopar.Cluster.of("1x4 h100"))
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        with contextlib.suppress(InfeasibleError):
            step.plan(case.state, case.batches[0])
        gc.collect()
        left = {type(each).__qualname__ for each in gc.garbage if type(each).__module__.startswith("autopar")}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert left == set()
