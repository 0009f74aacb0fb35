"""The collector rests while passes run, and leaves things as it found them."""

import gc

import pytest

from autopar.ir.passes import without_collection


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
